"""From a row of logits to the one token that is emitted, with or without a grammar."""
