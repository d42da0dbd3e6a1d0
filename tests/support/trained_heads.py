"""The tiny drafter, continued: with a Markov head (DSpark), or with a selector and convolutions
(DFlash 2), trained on texts of the tiny target.

Minutes on two cores. The result is no good drafter, but its heads know something, so that its
accepted length says whether they are computed as they were trained.
"""

import ast
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

import tiny_coder
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.engine.engine import Engine
from dflash_local.target_model.target import Target
from dflash_local.tune.drafter import TorchDrafter
from dflash_local.tune.weights import read_torch_drafter
from gguf_files import BOOL, UINT32, Value, changed
from gguf_files import Tensor as FileTensor
from pair_engine import prefill, request
from reference import Reference

F32 = gguf.GGMLQuantizationType.F32
RANK, TOP_K, TAPS, GROUP = 256, 8, 2, 16
_STEP_DECAY = 0.85  # later positions count less, as they are seldom reached


@dataclass(frozen=True)
class Text:
    """A text of the target: a prompt, its greedy answer, and the context feature of each token."""

    tokens: list[int]
    n_prompt: int
    features: NDArray[np.float32]


def prompts(n: int, seed: int = 0) -> list[str]:
    """Prompts from Python's standard library: the start of a piece of code, or a chat that asks for
    a function by its name and docstring."""
    draw = random.Random(seed)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found: list[str] = []
    while len(found) < n:
        code = draw.choice(files).read_text("utf-8", "replace")
        if len(found) % 2:
            lines = code.splitlines(keepends=True)
            first = draw.randrange(len(lines))
            found.append("".join(lines[first : first + draw.randrange(8, 24)])[:600])
        else:
            functions = [
                (node.name, docstring.split("\n")[0])
                for node in ast.walk(ast.parse(code))
                if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node))
            ]
            if functions:
                name, wanted = draw.choice(functions)
                found.append(
                    f"<|im_start|>user\nWrite a Python function `{name}`. {wanted}<|im_end|>\n"
                    "<|im_start|>assistant\n"
                )
    return found


def written(target: Target, texts: Sequence[str], n_tokens: int) -> list[Text]:
    """Greedy answers of a target that is open for several sequences, without a drafter."""
    n_seq = target.options.n_seq
    engine = Engine(target, None, n_seq)
    found = []
    for first in range(0, len(texts), n_seq):
        ids = [target.vocabulary.tokenize(text) for text in texts[first : first + n_seq]]
        ids = [tokens[:160] for tokens in ids if tokens]
        sequences = [engine.begin(request(tokens, 0, n_tokens)) for tokens in ids]
        engine.run(sequences)
        engine.slots.forget_all()
        for tokens, sequence in zip(ids, sequences, strict=True):
            whole = [*tokens, *sequence.tokens]
            features = prefill(target, whole).copy()
            target.clear(0)
            found.append(Text(whole, len(tokens), features))
    return found


def _shipped() -> TorchDrafter:
    target, drafter = tiny_coder.pair()
    return read_torch_drafter(drafter, target, dtype=torch.float32)


def _states(drafter: TorchDrafter, text: Text, anchors: Sequence[int]) -> Tensor:
    """The head's input where a block drafts, for anchors at these places in the text: [blocks,
    block_size - 1, n_embd]."""
    context = drafter.inject(torch.from_numpy(text.features))
    starts = torch.tensor(anchors)
    return drafter.hidden(context, torch.tensor(text.tokens)[starts], starts)[:, 1:]


def _blocks(texts: Sequence[Text], n: int, seed: int) -> Iterator[tuple[Text, list[int], Tensor]]:
    """Each text once: n anchors in its answer, and the tokens after each, -100 after its end."""
    draw = random.Random(seed)
    for text in draw.sample(list(texts), len(texts)):
        usable = range(text.n_prompt - 1, len(text.tokens) - 2)
        anchors = sorted(draw.sample(usable, min(n, len(usable))))
        if not anchors:
            continue
        padded = [*text.tokens, *[-100] * 16]
        yield text, anchors, torch.tensor([padded[at + 1 : at + 16] for at in anchors])


def _loss(scores: Tensor, truth: Tensor) -> Tensor:
    """Cross entropy of [blocks, positions, n], averaged by how much positions count."""
    each = functional.cross_entropy(
        scores.flatten(0, 1), truth.flatten(), ignore_index=-100, reduction="none"
    ).reshape(truth.shape)
    weights = _STEP_DECAY ** torch.arange(truth.shape[1]) * (truth != -100)
    return (each * weights).sum() / weights.sum()


def _before(texts: Text, anchors: Sequence[int], truth: Tensor) -> Tensor:
    first = torch.tensor([[texts.tokens[at]] for at in anchors])
    return torch.cat([first, truth[:, :-1].clamp(min=0)], dim=1)


def train_markov(
    texts: Sequence[Text], *, per_text: int, epochs: int, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of DSpark's heads; the layers stay as they are."""
    torch.manual_seed(seed)
    drafter = _shipped()
    n_vocab, n_embd = drafter.head.shape
    w1 = (0.02 * torch.randn(n_vocab, RANK)).requires_grad_()
    w2 = (0.02 * torch.randn(n_vocab, RANK)).requires_grad_()
    confidence = torch.zeros(1, n_embd + RANK, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    rows = []
    with torch.no_grad():
        for text, anchors, truth in _blocks(texts, per_text, seed):
            hidden = _states(drafter, text, anchors)
            rows.append((hidden, _before(text, anchors, truth), truth))
    steps = epochs * len(rows)
    weights = [w1, w2, confidence, bias]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for at in torch.randperm(len(rows)).tolist():
            hidden, before, truth = rows[at]
            logits = hidden @ drafter.head.T + w1[before] @ w2.T
            loss = _loss(logits, truth)
            chance = torch.cat([hidden, w1[before].detach()], dim=-1) @ confidence[0] + bias
            right = (logits.argmax(-1) == truth).float()
            known = truth != -100
            loss = loss + functional.binary_cross_entropy_with_logits(chance[known], right[known])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
    return {
        "markov_w1.weight": w1.detach(),
        "markov_w2.weight": w2.detach(),
        "conf_proj.weight": confidence.detach(),
        "conf_proj.bias": bias.detach(),
    }


def train_selector(
    texts: Sequence[Text], *, per_text: int, epochs: int, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of DFlash 2's selector and convolutions; the layers stay as they are."""
    torch.manual_seed(seed)
    drafter = _shipped()
    n_vocab, n_embd = drafter.head.shape
    made: dict[str, Tensor] = {
        "selector_predecessor.weight": 0.02 * torch.randn(n_vocab, RANK),
        "selector_successor.weight": 0.02 * torch.randn(n_vocab, RANK),
        # Gates are near one at first: a hidden state has values of about that size.
        "selector_hidden.weight": torch.randn(RANK, n_embd) / n_embd**0.5,
    }
    for layer in range(drafter.n_layer):
        for part in ("attn", "ffn"):
            base = torch.zeros(2, TAPS, n_embd)
            base[:, 0] = 1.0
            made[f"blk.{layer}.{part}_conv_base"] = base
            n_kernels = 2 * TAPS * (n_embd // GROUP)
            made[f"blk.{layer}.{part}_conv_proj.weight"] = torch.zeros(n_kernels, n_embd)
    for tensor in made.values():
        tensor.requires_grad_()
    drafter.weights |= made
    steps = epochs * len(texts)
    tables = [made[f"selector_{name}.weight"] for name in ("predecessor", "successor", "hidden")]
    convs = [tensor for name, tensor in made.items() if "_conv_" in name]
    optimizer = torch.optim.AdamW(
        [{"params": tables}, {"params": convs}], weight_decay=0.0, betas=(0.9, 0.98)
    )
    # The layers know no convolutions: larger steps would spoil more than they teach.
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 1e-4], total_steps=steps + 1)
    for epoch in range(epochs):
        for text, anchors, truth in _blocks(texts, per_text, seed + epoch):
            hidden = _states(drafter, text, anchors)
            logits = hidden @ drafter.head.T
            top, ids = logits.topk(TOP_K)
            before = made["selector_predecessor.weight"][_before(text, anchors, truth)]
            step = before * (hidden @ made["selector_hidden.weight"].T)
            after = made["selector_successor.weight"][ids]
            scores = top + torch.einsum("bnr,bnkr->bnk", step, after)
            matches = ids == truth[..., None]
            chosen = torch.where(matches.any(-1), matches.int().argmax(-1), -100)
            loss = _loss(logits, truth) + _loss(scores, chosen)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
    return {name: tensor.detach() for name, tensor in made.items()}


def write(path: Path, heads: dict[str, Tensor], kind: str = "F16") -> Path:
    """The tiny drafter with these heads; their matrices are of this type."""
    from random_model import quantize

    keys: dict[str, Value | None] = {"dflash.sample_from_anchor": (False, BOOL, None)}
    if "selector_hidden.weight" in heads:
        numbers = {
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
            "conv_kernel_size": TAPS,
            "conv_group_size": GROUP,
        }
        keys = {f"dflash.{name}": (value, UINT32, None) for name, value in numbers.items()}

    def add(tensors: dict[str, FileTensor]) -> None:
        for name, tensor in heads.items():
            values = tensor.cpu().numpy().astype(np.float32)
            if name.startswith(("markov", "selector")):
                number = gguf.GGMLQuantizationType[kind]
                tensors[name] = quantize(values, number), number
            else:
                tensors[name] = values, F32

    return changed(tiny_coder.pair()[1], path, keys=keys, tensors=add)


def accepted_length(
    drafter: Reference | Drafter, chain: Callable[[int], list[int]], texts: Sequence[Text]
) -> float:
    """Tokens per round along answers that are known. `chain(anchor)` is what the drafter drafts
    after what it was injected with last, in sequence 0."""
    rounds = emitted = 0
    for text in texts:
        drafter.truncate(0, 0)
        at = text.n_prompt  # of the anchor, which the target drew after the prompt
        drafter.inject(0, text.features[:at])
        while at < len(text.tokens) - 1:
            rest = text.tokens[at + 1 :]
            drafted = chain(text.tokens[at])[: len(rest) - 1]
            same = 0
            while same < len(drafted) and drafted[same] == rest[same]:
                same += 1
            rounds, emitted = rounds + 1, emitted + same + 1
            drafter.inject(0, text.features[at : at + same + 1])
            at += same + 1
    return emitted / rounds


def of_reference(reference: Reference, texts: Sequence[Text], n: int = 15) -> float:
    """The accepted length of chains of n drafts of the reference."""
    return accepted_length(reference, lambda anchor: reference.best_chain(0, anchor, n), texts)


def of_drafter(drafter: Drafter, texts: Sequence[Text], n: int = 15) -> float:
    """The same of our own drafter."""

    def chain(anchor: int) -> list[int]:
        nothing = np.empty((0, texts[0].features.shape[1]), np.float32)
        request = DraftRequest(seq=0, features=nothing, anchor=anchor, n_draft=n)
        return list(drafter.draft([request])[0].tokens)

    return accepted_length(drafter, chain, texts)
