"""Whether drafting pays on this machine, and how many rows to verify."""
