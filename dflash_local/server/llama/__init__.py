"""llama-server's own API: completion, infill, tokens, properties and slots."""
