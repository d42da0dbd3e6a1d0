"""How results are shown: JSON, tables for a terminal and for Markdown, and a picture."""
