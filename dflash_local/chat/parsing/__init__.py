"""The parsers, one upon the other: text that waits and JSON, an answer with its calls."""
