"""What the numbers are compared with: llama-server on the same prompts, and the paper."""
