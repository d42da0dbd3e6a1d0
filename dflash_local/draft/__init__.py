"""Drafts, the shapes they take, and the drafters that propose them."""
