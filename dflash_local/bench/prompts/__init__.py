"""What the models are asked: built-in prompts, published datasets, files of the user's own."""
