"""The target: a GGUF model in a llama.cpp context, its KV cells and its tapped layers."""
