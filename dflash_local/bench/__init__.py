"""Measures decoding on this machine: plain and drafted in turn, on the same loaded model.

`benchmark` is one run from beginning to end. `prompts` is what the models are asked, `measure` how
it is timed, `peers` what it is compared with, `report` how it is shown. `shapes` makes models of
random weights with the dimensions of real ones; `replay` lets given texts come out, and decides how
many drafts of such models are accepted. `outlook` says what the costs of a calibration mean.
"""
