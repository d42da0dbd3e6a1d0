"""The parsers, one upon the other: text that waits, JSON, a call, an answer."""
