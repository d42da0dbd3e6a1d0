"""The results of a target's last pass: logits, and features of the tapped layers."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import ClosedError, InputError
from dflash_local.llama.native import TargetPass, TokenDraw
from dflash_local.target_model.options import TargetOptions


class Readout:
    """Stays readable until the next pass; features until their rows are overwritten."""

    options: TargetOptions
    n_embd: int

    def __init__(self) -> None:
        self._pass: TargetPass | None = None
        self._output: list[bool] = []
        self.feature_rows: Sequence[int] = ()
        """The number in the store of each row of the last batch, or of `decode_ahead`, step by
        step."""
        self.n_decoded = 0
        """The number that the next row will get."""

    @property
    def native(self) -> TargetPass:
        """The passes of its context, whose store a drafter may read. Raises ClosedError."""
        if self._pass is None:
            raise ClosedError("this target is closed; load it again")
        return self._pass

    def draw(self, how: TokenDraw | None, output_row: int) -> int:
        """Draw a token from an output row of the last pass, as the `native.TokenDraw` says; None
        takes the likeliest. -1 if the logits are not finite numbers, -2 if none is left."""
        return self.native.draw(how, output_row)

    def logits(self, row: int) -> NDArray[np.float32]:
        """Logits of a row of the last batch, float32 [n_vocab], fetched from the device."""
        self._check_row(row)
        if not self._output[row]:
            raise InputError(f"row {row} of the last batch was decoded without logits")
        return self.output_logits(sum(self._output[:row]))

    def output_logits(self, output_row: int) -> NDArray[np.float32]:
        """Logits of an output row of the last pass, float32 [n_vocab]."""
        return self.native.logits(output_row)

    def candidates(self, output_row: int, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k largest logits of an output row of the last batch: ids int32 [k] and logits float32
        [k], the largest first, equal ones by id. If not all equal ones fit, the CPU takes the
        lowest ids, a GPU any of them.

        A GPU finds those of all rows at the first call. Raises NotFiniteError.
        """
        return self.native.candidates(output_row, k)

    def log_sum(self, output_row: int) -> float:
        """log(sum(exp(logits))) of an output row of the last batch."""
        return self.native.log_sum(output_row)

    @property
    def n_features(self) -> int:
        """Width of a context feature: taps times hidden size."""
        return self.n_embd * len(self.options.tapped_layers)

    def stored(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Context features of rows by their numbers in the store, float32 [n, n_features]."""
        self._check_tapped()
        return self.native.hidden_states(rows)

    def hidden_states(self, rows: Iterable[int] | None = None) -> NDArray[np.float32]:
        """Inputs of the tapped layers for rows of the last batch, float32 [n_rows, n_taps, n_embd].

        The input of layer i+1 is the residual stream after layer i. None: all rows of the batch.
        """
        self._check_tapped()
        n = len(self._output)
        wanted = list(range(n) if rows is None else rows)
        for row in wanted:
            self._check_row(row)
        states = self.stored([self.feature_rows[row] for row in wanted])
        return states.reshape(len(wanted), len(self.options.tapped_layers), self.n_embd)

    def _check_open(self) -> None:
        _ = self.native

    def _check_row(self, row: int) -> None:
        self._check_open()
        if not 0 <= row < len(self._output):
            raise InputError(f"row {row} is not in the last batch of {len(self._output)}")

    def _check_tapped(self) -> None:
        self._check_open()
        if not self.options.tapped_layers:
            raise InputError("no layers are tapped; load with tapped_layers or with a drafter")
