"""A drafter's tensors: their names, shapes and rows."""
