"""Measures decoding on this machine: plain against drafted, in turn, on the same loaded model."""
