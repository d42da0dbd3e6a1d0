"""What HTTP needs whatever the API is: who is answered, limits, errors, streams, the access log."""
