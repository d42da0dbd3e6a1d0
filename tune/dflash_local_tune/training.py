"""The training of a drafter: steps, tokens per round on held-out answers, and the best weights.

All weights are trained with AdamW where their moments have room. Elsewhere the matrices stay as
they are and get low-rank additions (LoRA, arXiv 2106.09685), which need next to no memory. A
drafter from nothing has a recipe of its own: Muon for the matrices, sharper labels, and a learning
rate that falls to zero.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dflash_local.gguf.file import GgufFile
from dflash_local_tune.answers import Answer
from dflash_local_tune.drafter import TorchDrafter
from dflash_local_tune.objective import (
    Outcome,
    all_anchors,
    losses,
    n_rounds,
    outcome,
    random_anchors,
)

N_ANCHORS, CPU_ANCHORS = 32, 8
"""Blocks of one answer in a step. More cost a GPU time and taught nothing more; a CPU has the time
for few."""
RATE, _LOW_RANK_RATE = 0.05, 3e-4
"""The largest learning rates. The first one is for a width of 1, as Adam's best rate falls with it
(arXiv 2203.03466); five times as much cost general prompts 6 %. Additions begin at zero and need
more."""
_RANK = 64
WARM_UP = 20
"""Steps in which the learning rate rises."""
_LAST_RATE = 0.1
_CLIP = 1.0
_MUON_MEMORY = 0.95
_MUON_AT_ONCE = 1 << 24
"""Numbers of matrices in one step of Muon: it takes some 20 bytes for each."""
_MEMORY = 0.995
"""Of the running mean of the weights: it goes back some 200 steps."""
_PATIENCE = 0.5
"""Part of the whole training. The rate falls over all of it, and its gain comes late: with a
quarter, runs ended too soon."""
_FROZEN = ("token_embd.weight", "output.weight", "d2t", "rope_freqs.weight")
_LOOKED_UP = ("markov_w1.weight", "selector_predecessor.weight", "selector_successor.weight")
"""Tables by token, which a low-rank addition does not fit."""


@dataclass(frozen=True)
class Measured:
    """Tokens per round on held-out answers, after a number of steps."""

    step: int
    length: float


class Trainer:
    """Trains a drafter in place. `n_packed`: answers of one pass, as many as the memory has room
    for. `rate`: the largest learning rate of all weights, times the drafter's width. `n_anchors`:
    blocks of one answer in a step, if not the usual number. `warm_up`: steps in which the rate
    rises. `n_ctx`: answers are no longer; given that, a GPU's steps have all one shape, and are
    compiled where PyTorch can do so. `from_nothing`: by the recipe of a drafter that began with
    random weights."""

    def __init__(
        self,
        drafter: TorchDrafter,
        *,
        low_rank: bool,
        n_packed: int = 1,
        rate: float = RATE,
        n_anchors: int | None = None,
        warm_up: int = WARM_UP,
        n_ctx: int = 0,
        seed: int = 0,
        from_nothing: bool = False,
    ) -> None:
        self.drafter = drafter
        self.low_rank = low_rank
        self._from_nothing = from_nothing
        self._n_packed = n_packed
        self._warm_up = warm_up
        self.step_number = 0
        self.history: list[Measured] = []
        self._device = drafter.head.device
        self._n_anchors = n_anchors or (CPU_ANCHORS if self._device.type == "cpu" else N_ANCHORS)
        self._shape = {"n_rows": n_ctx, "n_anchors": self._n_anchors}
        self._compiled = None
        if n_ctx and self._device.type == "cuda" and find_spec("triton"):
            self._compiled = torch.compile(losses, dynamic=False)
        self._generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self._trained = _trainable(drafter, low_rank)
        self.mean = {name: each.detach().clone() for name, each in self._trained.items()}
        """The running mean of the trained weights. It is measured and kept: it has less of the
        noise of single steps."""
        self._best: dict[str, Tensor] = self._copy()
        width = int(drafter.keys["embedding_length"])
        self._rate = _LOW_RANK_RATE if low_rank else rate / width
        matrices = {
            name: each
            for name, each in self._trained.items()
            if from_nothing and _by_muon(name, each.shape)
        }
        others = [each for name, each in self._trained.items() if name not in matrices]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if matrices:
            self._optimizers.append(Muon(matrices.values()))

    @property
    def n_trained(self) -> int:
        return sum(each.numel() for each in self._trained.values())

    def scale_taps(self, answers: Sequence[Answer], *, keep_products: bool) -> None:
        """Multiply the features by `tap_scale` of these answers, before any step. `keep_products`:
        `fc` changes so that its products stay as they are; random ones need not."""
        self.drafter.tap_scale = scale = tap_scale(answers).to(self._device)
        if keep_products:
            for weights in (self._trained, self.mean, self._best):
                with torch.no_grad():
                    weights["fc.weight"].div_(scale.to(weights["fc.weight"].device))

    def step(self, answers: Sequence[Answer], progress: float) -> Tensor:
        """One step over blocks of these answers; their mean loss, [], which nothing waits for.
        `progress`, 0 to 1, is the finished part of the training: the learning rate falls with
        it."""
        total = torch.zeros((), device=self._device)
        for pack in self._packs(answers):
            starts = [random_anchors(each, self._n_anchors, self._generator) for each in pack]
            with self._precision():
                loss = self._outcome(pack, starts).loss.sum() / len(answers)
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._trained.values(), _CLIP)
        rise = min(1.0, (self.step_number + 1) / self._warm_up)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * self._left(min(progress, 1.0)) * rise
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_number += 1
        # At first it forgets faster: the beginning is no good estimate of anything.
        memory = min(_MEMORY, self.step_number / (self.step_number + 9))
        trained = [each.detach() for each in self._trained.values()]
        torch._foreach_lerp_(list(self.mean.values()), trained, 1 - memory)
        return total

    def _left(self, done: float) -> float:
        """The part of the learning rate that is left after this part of the training."""
        if self._from_nothing:
            return 1 - done
        return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2

    def _outcome(self, pack: Sequence[Answer], starts: Sequence[Tensor]) -> Outcome:
        """Compiled, a step takes an H200 a third of the time: by itself it waits for Python."""
        sharper = self._from_nothing
        if self._compiled is not None:
            try:
                return outcome(
                    self.drafter, pack, starts, of=self._compiled, sharper=sharper, **self._shape
                )
            except torch._dynamo.exc.TorchDynamoException:  # Triton wants a C compiler, too
                self._compiled = None
        return outcome(self.drafter, pack, starts, sharper=sharper)

    def move(self, device: str) -> None:
        """All weights and moments to a device: between its turns the trainer leaves the GPU."""
        drafter = self.drafter
        added = [each for pair in drafter.adapters.values() for each in pair]
        if drafter.tap_scale is not None:
            added.append(drafter.tap_scale)
        for each in (drafter.head, *drafter.weights.values(), *added, *self.mean.values()):
            each.data = each.data.to(device)  # stays the tensor that the optimiser knows
        for optimizer in self._optimizers:
            for moments in optimizer.state.values():
                for name in moments.keys() - {"step"}:  # a count, which stays on the host
                    moments[name] = moments[name].to(device)

    @torch.no_grad()
    def length_on(self, answers: Sequence[Answer]) -> float:
        """Tokens per round on given answers, as the engine counts them: a round begins behind the
        tokens that the one before it emitted. Blocks are drafted at all anchors, many at once, and
        those of the rounds are read."""
        tokens = rounds = 0
        for pack in self._packs(answers):
            anchors = [all_anchors(each) for each in pack]
            found = self._accepted(pack, anchors)
            tokens += sum(map(len, anchors))
            rounds += sum(map(n_rounds, found))
        return tokens / rounds

    def _accepted(self, pack: Sequence[Answer], anchors: Sequence[Tensor]) -> list[list[int]]:
        """The numbers of tokens that greedy rounds would emit at these anchors of each answer."""
        found: list[list[int]] = [[] for _ in pack]
        step = max(N_ANCHORS, self._n_anchors)
        for begin in range(0, max(map(len, anchors)), step):
            rest = [i for i, each in enumerate(anchors) if len(each) > begin]
            starts = [anchors[i][begin : begin + step] for i in rest]
            with self._precision():
                accepted = outcome(self.drafter, [pack[i] for i in rest], starts).accepted.tolist()
            for i, at, each in zip(rest, starts, accepted, strict=True):
                found[i] += each[: len(at)]
        return found

    def _packs(self, answers: Sequence[Answer]) -> Iterator[Sequence[Answer]]:
        for begin in range(0, len(answers), self._n_packed):
            yield answers[begin : begin + self._n_packed]

    def measure(self, answers: Sequence[Answer]) -> Measured:
        """`length_on` held-out answers with the mean weights, noted; they are kept if it is the
        best so far."""
        self._swap()
        try:
            found = Measured(self.step_number, self.length_on(answers))
            if not self.history or found.length > self.best.length:
                self._best = self._copy()
        finally:
            self._swap()
        self.history.append(found)
        return found

    def _swap(self) -> None:
        for name, each in self._trained.items():
            each.data, self.mean[name].data = self.mean[name].data, each.data

    @property
    def best(self) -> Measured:
        return max(self.history, key=lambda each: each.length)

    def is_flat(self, progress: float) -> bool:
        """Whether held-out answers have gained nothing for so long that the rest will hardly gain
        more. `progress` as for `step`."""
        since = (self.history[-1].step - self.best.step) / max(1, self.step_number)
        return since * progress > _PATIENCE

    def use_best(self) -> None:
        """Go back to the weights that measured best."""
        with torch.no_grad():
            for name, value in self._best.items():
                self._trained[name].copy_(value)

    def weights(self, *, best: bool = False) -> dict[str, Tensor]:
        """The drafter's weights by name, float32 on the host, low-rank additions and the factors of
        the features included. `best`: those that measured best, if there are no additions."""
        drafter = self.drafter
        found = {name: value.detach() for name, value in drafter.weights.items()}
        for name, (down, up) in drafter.adapters.items():
            weight = f"{name}.weight"
            found[weight] = found[weight].float() + (up @ down).detach()
        found |= self._best if best else {}
        found = {name: value.float().cpu() for name, value in found.items()}
        if drafter.tap_scale is not None:
            found["fc.weight"] = found["fc.weight"] * drafter.tap_scale.float().cpu()
        return found

    def state(self) -> dict[str, Any]:
        """All that `restore` needs to go on as if nothing had happened."""
        return {
            "low_rank": self.low_rank,
            "step": self.step_number,
            "history": [(each.step, each.length) for each in self.history],
            "trained": self._copy(),
            "mean": {name: each.cpu() for name, each in self.mean.items()},
            "best": self._best,
            "optimizers": [each.state_dict() for each in self._optimizers],
            "tap_scale": self.drafter.tap_scale,
            "anchors": self._generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state` of the same drafter."""
        with torch.no_grad():
            for name, value in state["trained"].items():
                self._trained[name].copy_(value)
                self.mean[name].copy_(state["mean"][name])
        self._best = dict(state["best"])
        self.step_number = state["step"]
        self.history = [Measured(*each) for each in state["history"]]
        for optimizer, of_it in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(of_it)
        if (scale := state["tap_scale"]) is not None:
            self.drafter.tap_scale = scale.to(self._device)
        self._generator.set_state(state["anchors"])

    def _copy(self) -> dict[str, Tensor]:
        """On the host: on the device it would take as much again as the weights."""
        return {name: each.detach().to("cpu", copy=True) for name, each in self._trained.items()}

    def _precision(self) -> AbstractContextManager[Any]:
        if self._device.type == "cpu":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)


class Muon(torch.optim.Optimizer):
    """Steps of matrices by the orthogonal part of their momentum (arXiv 2502.16982): all directions
    move alike, by as much as Adam would move them."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__(weights, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[Tensor]] = {}
            for each in group["params"]:
                of_shape.setdefault(each.shape, []).append(each)
            for shape, weights in of_shape.items():  # together, as a small product costs no less
                n = max(1, _MUON_AT_ONCE // shape.numel())
                for begin in range(0, len(weights), n):
                    self._step(weights[begin : begin + n], group["lr"])

    def _step(self, weights: list[Tensor], rate: float) -> None:
        """Of matrices of one shape."""
        gradients = [each.grad for each in weights if each.grad is not None]
        for each in weights:
            if not self.state[each]:
                self.state[each]["momentum"] = torch.zeros_like(each)
        momenta = [self.state[each]["momentum"] for each in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - _MUON_MEMORY)
        ahead = torch._foreach_lerp(gradients, momenta, _MUON_MEMORY)
        moved = _orthogonal(torch.stack(ahead))
        scale = 0.2 * max(weights[0].shape) ** 0.5 * rate
        torch._foreach_add_(weights, list(moved.unbind()), alpha=-scale)


def _orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices, [n, a, b], of singular values near one, by a Newton-Schulz iteration
    of fifth order."""
    rows = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = rows.shape[1] > rows.shape[2]
    rows = rows.mT if tall else rows
    rows = rows / (rows.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        products = rows @ rows.mT
        products = -4.7750 * products + 2.0315 * products @ products
        rows = 3.4445 * rows + products @ rows
    found: Tensor = (rows.mT if tall else rows).float()
    return found


def _by_muon(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and name not in _LOOKED_UP and name != "markov_w2.weight"


def tap_scale(answers: Sequence[Answer]) -> Tensor:
    """Factors for each feature, [n_features] in the type of the features: one over its usual size
    in these answers. Prompts do not count: the first token of a text often has a hundred times the
    size of others."""
    rows = torch.cat([each.features[each.n_prompt :].float() for each in answers])
    return rows.square().mean(dim=0).rsqrt().clamp(max=1e4).to(answers[0].features.dtype)


def is_trained(name: str) -> bool:
    """Whether a tensor of this name is the drafter's own. Weights shared with the target stay as
    they are."""
    return name not in _FROZEN and not name.endswith(".scale")


def n_trainable(file: GgufFile) -> int:
    """The number of a drafter's weights that may be trained."""
    return sum(math.prod(each.shape) for each in file.tensors.values() if is_trained(each.name))


def n_by_muon(file: GgufFile) -> int:
    """The number of those weights that Muon trains in a drafter from nothing."""
    return sum(
        math.prod(each.shape)
        for each in file.tensors.values()
        if is_trained(each.name) and _by_muon(each.name, each.shape)
    )


def n_low_rank(file: GgufFile) -> int:
    """The number of weights trained if matrices get low-rank additions."""
    return sum(
        _RANK * sum(each.shape) if _takes_addition(each.name, each.shape) else math.prod(each.shape)
        for each in file.tensors.values()
        if is_trained(each.name) and each.name not in _LOOKED_UP
    )


def _takes_addition(name: str, shape: Sequence[int]) -> bool:
    return name not in _LOOKED_UP and len(shape) == 2 and min(shape) > 2 * _RANK


def _trainable(drafter: TorchDrafter, low_rank: bool) -> dict[str, Tensor]:
    """The tensors that the optimiser trains, by name; adapters are put into the drafter."""
    found: dict[str, Tensor] = {}
    for name in filter(is_trained, list(drafter.weights)):
        weight = drafter.weights[name]
        if low_rank and name in _LOOKED_UP:
            continue
        if low_rank and _takes_addition(name, weight.shape):
            n_out, n_in = weight.shape
            down = torch.randn(_RANK, n_in, device=weight.device) / math.sqrt(n_in)
            up = torch.zeros(n_out, _RANK, device=weight.device)
            plain = name.removesuffix(".weight")
            drafter.adapters[plain] = (down.requires_grad_(), up.requires_grad_())
            found[f"{plain}.down"], found[f"{plain}.up"] = drafter.adapters[plain]
            continue
        drafter.weights[name] = weight.detach().float().clone().requires_grad_()
        found[name] = drafter.weights[name]
    return found
