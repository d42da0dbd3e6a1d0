"""Fits a drafter to a target and to a user's own text. Needs PyTorch: `pip install
dflash-local[tune]`. The text stays the target's own; only how much of it is drafted right changes.
"""
