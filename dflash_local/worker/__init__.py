"""The thread that owns a model, the requests that it runs, and the text they produce."""
