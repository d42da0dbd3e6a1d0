"""The models that a server offers: loaded when they are first asked for, unloaded when idle."""
