"""One engine: slots for sequences, their prompts, and the rounds that draft and verify."""
