"""Models by name: the registry of pairs, and from what a user wrote to files on this disk."""
