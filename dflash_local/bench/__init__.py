"""Measures decoding on this machine: plain and drafted in turn, on the same loaded model.

`benchmark` is one run from beginning to end. `prompts` are the models' questions, `measure` times
the answers, `report` shows the results.
"""
