"""Measures decoding on this machine: plain and drafted in turn, on the same loaded model.

`benchmark` is one run from beginning to end. `prompts` are the models' questions, `measure` times
the answers, `peers` are the rivals, `report` shows the results. `shapes` makes models of random
weights with the dimensions of real ones; `replay` lets given texts come out, and decides the number
of accepted drafts of such models. `outlook` tells the meaning of a calibration's costs.
"""
