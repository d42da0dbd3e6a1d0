"""Whether two files fit each other and this machine, judged from their headers."""
