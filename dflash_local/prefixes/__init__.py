"""Beginnings of texts: what is kept of them, where, and how much of one a prompt can use."""
