"""GGUF files, read and checked: headers, vocabularies, and a drafter's keys and tensors."""
