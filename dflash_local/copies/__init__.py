"""Drafts without a model: what comes next as the text already has it."""
