"""Fixtures that only tests of the server share."""

from guarded_server import guarded

__all__ = ["guarded"]  # a fixture that has a file of its own
