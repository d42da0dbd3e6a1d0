"""The prompts: built-in ones, published datasets, files of the user's own."""
