"""What is told: JSON, tables for a terminal and for Markdown, and a picture."""
