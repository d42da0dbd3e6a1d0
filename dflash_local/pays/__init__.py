"""Whether drafting pays on this machine, and how many rows to verify.

The words of this package, with time counted in plain rounds wherever nothing else is said:

- *base*: rows of a plain pass, one for each sequence.
- *gain*: how many times as fast as plain decoding drafting is.
- *switch*: what a pass with another number of rows costs once, for its new graph; *way*: there and
  back.
- *plan*: a comparison of drafting with plain decoding, made every few rounds; *idle* rounds are
  plain until the next one.
- *probe*: a few rounds that draft only to see whether it pays. *Overdue*: one that is made whatever
  it costs, as drafting was not tried for long. *Glance*: a probe too dear to be verified, which
  drafts only to see what the drafter thinks of the text.
- *upkeep*: by how much a probe gets dearer with each round that it waits.
- *doubt*: what drafting is thought to lose by now, in all rounds since it began; *spell*: these
  rounds; *credit*: what it may lose before it is suspended.
"""
