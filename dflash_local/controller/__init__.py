"""Whether drafting pays on this machine, and how many rows to verify.

Time is counted in plain rounds wherever nothing else is said. *Base*: the rows of a plain pass, one
for each sequence. *Gain*: the speed-up of drafting over plain decoding. *Look*: a round that drafts
only to see whether it pays. docs/architecture.md has the rules on one page.
"""
