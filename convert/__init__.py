"""`dflash_local.convert`: the place of the converter from published drafters to GGUF."""
