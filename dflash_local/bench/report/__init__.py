"""The forms of results: JSON, tables for a terminal and for Markdown, and a picture."""
