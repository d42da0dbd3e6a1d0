"""Beginnings of texts: their kept states and places, and the part that a prompt can use."""
