"""Drafts without a model: the next tokens as the text already has them."""
