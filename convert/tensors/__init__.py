"""A drafter's tensors: what they are called, what shape they have, and their rows."""
