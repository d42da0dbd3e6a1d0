"""Whether this machine and a pair work as they should, and if not, the remedy."""
