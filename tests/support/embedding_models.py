"""Tiny models that make vectors or scores of texts, with random weights."""

import string
from pathlib import Path

from gguf_files import ARRAY, INT32, STRING, UINT32, changed, keys_of
from random_model import RandomModel

N_CTX, N_EMBD, N_LAYER, N_HEAD, N_FF = 512, 64, 2, 4, 96
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = (
    "a is the of to and in that this are by for from with an which also such will not be at "
    "its i believe meaning life test another write joke about very long hello world good bye "
    "machine learning city paris physical system uses power process new knowledge field study "
    "data tasks france capital large river string prompt what does query document cat dog sat "
    "on mat "
)
_ENDS = ("s", "ing", "ed", "er", "ly", "tion")


def write_bert(
    path: Path, *, pooling: int | None = 1, classifier: bool = False, seed: int = 0
) -> Path:
    """A BERT of 64 dimensions that reads 512 tokens, with a WordPiece vocabulary. `pooling` is the
    number in its file; None leaves the key out. With `classifier` it has a reranker's head."""
    model = RandomModel("bert", "F16", seed)
    model.numbers(
        block_count=N_LAYER,
        context_length=N_CTX,
        embedding_length=N_EMBD,
        feed_forward_length=N_FF,
        attention__head_count=N_HEAD,
        attention__layer_norm_epsilon=1e-12,
    )
    model.key("attention.causal", False)
    if pooling is not None:
        model.key("pooling_type", pooling)
    _words(model)
    n_vocab = len(model.keys["tokenizer.ggml.tokens"][0])
    model.matrix("token_embd.weight", n_vocab, N_EMBD, gain=8)
    model.plain("position_embd.weight", 0.3 * model.normal("positions", N_CTX, N_EMBD))
    model.plain("token_types.weight", 0.1 * model.normal("types", 2, N_EMBD))
    _norm(model, "token_embd_norm")
    for layer in range(N_LAYER):
        block = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            _linear(model, block + name, N_EMBD, N_EMBD)
        _linear(model, block + "ffn_up", N_FF, N_EMBD)
        _linear(model, block + "ffn_down", N_EMBD, N_FF)
        _norm(model, block + "attn_output_norm")
        _norm(model, block + "layer_output_norm")
    if classifier:
        _linear(model, "cls", N_EMBD, N_EMBD)
        _linear(model, "cls.output", 1, N_EMBD)
    return model.write(path)


def write_decoder(path: Path, target: Path) -> Path:
    """The Qwen3 decoder at `target` as an embedding model: the vector of a text's last token."""
    return changed(target, path, keys={"qwen3.pooling_type": (3, UINT32, None)})


def write_rerank_template(path: Path, target: Path) -> tuple[Path, str]:
    """The Qwen3 decoder at `target` as a reranker with two classes and a template for pairs, which
    is returned, too."""
    eos = keys_of(target)["tokenizer.ggml.eos_token_id"][0]
    name = keys_of(target)["tokenizer.ggml.tokens"][0][eos]
    template = f"Query: {{query}}\nDocument: {{document}}{name}\n"
    model = RandomModel("qwen3", "F16", 0)
    width = keys_of(target)["qwen3.embedding_length"][0]
    model.matrix("cls.output.weight", 2, width)
    keys = {
        "tokenizer.chat_template.rerank": (template, STRING, None),
        "qwen3.classifier.output_labels": (["yes", "no"], ARRAY, STRING),
    }
    return changed(target, path, keys=keys, tensors=lambda all: all.update(model.tensors)), template


def _words(model: RandomModel) -> None:
    """A vocabulary as llama.cpp has BERT's: a token that begins a word has a mark before it."""
    begun = [*_WORDS.split(), *string.ascii_lowercase[1:], *string.digits, *".,?!'-"]
    unique = list(dict.fromkeys(begun))
    inner = [*_ENDS, *(c for c in string.ascii_lowercase if c not in _ENDS), *string.digits]
    tokens = [*_SPECIAL, *("\u2581" + word for word in unique), *inner]
    kinds = [3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL))
    model.keys |= {
        "tokenizer.ggml.model": ("bert", STRING, None),
        "tokenizer.ggml.pre": ("jina-v2-en", STRING, None),
        "tokenizer.ggml.tokens": (tokens, ARRAY, STRING),
        "tokenizer.ggml.token_type": (kinds, ARRAY, INT32),
        "tokenizer.ggml.token_type_count": (2, UINT32, None),
    }
    for name, token in (
        ("padding", "[PAD]"),
        ("unknown", "[UNK]"),
        ("bos", "[CLS]"),
        ("cls", "[CLS]"),
        ("seperator", "[SEP]"),  # so it is written
        ("mask", "[MASK]"),
    ):
        model.keys[f"tokenizer.ggml.{name}_token_id"] = (tokens.index(token), UINT32, None)


def _linear(model: RandomModel, name: str, rows: int, columns: int) -> None:
    model.matrix(f"{name}.weight", rows, columns)
    model.plain(f"{name}.bias", 0.1 * model.normal(f"{name}.bias", rows))


def _norm(model: RandomModel, name: str) -> None:
    model.norm(f"{name}.weight", N_EMBD)
    model.plain(f"{name}.bias", 0.1 * model.normal(f"{name}.bias", N_EMBD))
