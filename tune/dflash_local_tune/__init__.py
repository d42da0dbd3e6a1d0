"""Fits a drafter to a target and to a user's own text, or makes one from nothing. Needs PyTorch.

The text stays the target's own; only how much of it is drafted right changes. All of this works
with modules of dflash-local that are no public interface, so each version needs the same one of it.
"""
