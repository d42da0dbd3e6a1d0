"""A probe on hidden states: does a token lie inside a comment? Read off one layer of a GGUF model.

python examples/hidden_states.py
"""

from __future__ import annotations

import numpy as np

from dflash_local import Target
from dflash_local.pairs.find import find_pair

LAYER = 5
CODE = """
def area(width, height):
    # both in metres, and never negative
    return width * height

# a list of pairs, sorted by name
pairs = sorted(names.items())
for name, value in pairs:  # the shortest first
    print(name, value)  # one per line
"""


def main() -> None:
    path = find_pair("smollm2-135m", say=print).target  # or the path of your own GGUF file
    with Target.load(path, n_ctx=512, tapped_layers=(LAYER,)) as target:
        tokens = target.vocabulary.tokenize(CODE)
        n = len(tokens)
        target.decode(tokens, range(n), [0] * n, [False] * n)
        states = target.hidden_states()[:, 0]  # float32 [n, n_embd]: the input of this layer
        pieces = [target.vocabulary.piece(token).decode() for token in tokens]

    inside, labels = False, []
    for piece in pieces:
        inside = (inside or "#" in piece) and "\n" not in piece
        labels.append(inside)

    # Least squares on every other token, tried on the rest.
    features = np.hstack([states, np.ones((n, 1), np.float32)])
    wanted = np.array(labels, np.float32) * 2 - 1
    weights, *_ = np.linalg.lstsq(features[::2], wanted[::2], rcond=1e-3)
    right = np.sign(features[1::2] @ weights) == wanted[1::2]
    print(f"layer {LAYER}: {right.mean():.0%} of {len(right)} tokens told apart")


if __name__ == "__main__":
    main()
