"""The Hugging Face hub: what its repositories hold, files in its cache, and what can go wrong."""
