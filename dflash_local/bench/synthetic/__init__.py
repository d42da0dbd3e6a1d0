"""Acceptance as it was recorded from a trained pair, for models whose own drafts mean nothing."""
