"""A drafter's config.json, as the keys of its GGUF file."""
