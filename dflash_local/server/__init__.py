"""The OpenAI-compatible server: one file per API, over one `Model`."""
