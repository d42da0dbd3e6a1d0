"""The tokenizer keys of a drafter's GGUF file, which are those of its target."""
