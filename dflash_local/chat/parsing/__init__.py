"""What parsers of several dialects share: marks, calls and JSON in text that comes in pieces."""
