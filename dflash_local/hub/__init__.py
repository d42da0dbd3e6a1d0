"""The Hugging Face hub: its repositories, files in its cache, and its errors."""
