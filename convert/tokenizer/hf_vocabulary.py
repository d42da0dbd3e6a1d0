"""A target's vocabulary from its Hugging Face files, as llama.cpp's converter stores it.

The `gguf` package reads special tokens, merges and the chat template. The tokens, their types and
the name of the pre-tokenizer are read here: that package leaves them to its caller.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType, TokenType
from gguf.vocab import bytes_to_unicode

from dflash_local.errors import FileError
from dflash_local.gguf.vocabulary import vocabulary_fault

from ..files.reading import read_json
from ..key import Key
from . import tiktoken_ranks
from .pretokenizers import TokenizerFamily, check_pattern, family_of

TOKENIZER_LIMIT = 1 << 27
"""Bytes of a tokenizer's file."""

_RESERVED_TOKENS = 256  # after the ranks of Kimi's tiktoken.model
_SCORE = -1000.0  # of a token without a score
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Gemma 4's control tokens that a chat parser needs in the output
_VISIBLE = frozenset(
    (
        *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>'),
    )
)
_LOOK_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


_Tokens = dict[int, tuple[str, TokenType]]
"""Text and type of the tokens, by id."""


@dataclass(frozen=True)
class _Added:
    text: str
    special: bool
    normalized: bool


@dataclass(frozen=True)
class _Files:
    """The parsed files of a tokenizer; `tokenizer` is empty if there is no tokenizer.json."""

    folder: Path
    n_vocab: int
    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    """tokenizer_config.json; empty if there is none."""

    def fail(self, file: str, message: str) -> FileError:
        return FileError(f"{self.folder / file}: {message}")


def read_vocabulary(folder: Path, n_vocab: int) -> list[Key]:
    """The `tokenizer.*` keys of the model in `folder`, with `n_vocab` tokens.

    Ids without a token are filled with unused tokens. Raises FileError for files that are missing
    or wrong, and for unknown families.
    """
    config = _json(folder / "config.json")
    family = family_of(config, str(folder / "config.json"))
    needed = "tiktoken.model" if family.layout == "ranks" else "tokenizer.json"
    if not (folder / needed).is_file():
        raise FileError(
            f"{folder}: has no {needed}, which the tokenizer of model_type "
            f"{config.get('model_type')!r} is in"
        )
    files = _Files(
        folder,
        n_vocab,
        _json(folder / "tokenizer.json", missing_ok=True),
        _json(folder / "tokenizer_config.json", missing_ok=True),
    )
    ranks: dict[bytes, int] = {}
    if family.layout == "ranks":
        ranks = tiktoken_ranks.read_ranks(folder / "tiktoken.model")
        tokens = _rank_tokens(files, ranks)
    elif family.layout == "bpe":
        tokens = _bpe_tokens(files, family)
    else:
        tokens = _gemma4_tokens(files)
    keys = _keys(files, family, tokens, tiktoken_ranks.merges(ranks))
    _check(keys, folder)
    return keys


def _keys(files: _Files, family: TokenizerFamily, tokens: _Tokens, merges: list[str]) -> list[Key]:
    """`merges`: those that are not in the files."""
    is_gemma4 = family.layout == "gemma4"
    filled = [tokens.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(files.n_vocab)]
    special = _special_tokens(files, load_merges=family.layout != "ranks")
    ids = {text: number for number, (text, _) in tokens.items()}
    for role, text in family.roles.items():
        if text not in ids:
            raise files.fail("tokenizer.json", f"has no token {text!r}, which is its {role}")
        special.special_token_ids.setdefault(role, ids[text])
    if family.layout == "bpe" and not special.merges:
        raise files.fail("tokenizer.json", "has no merges, and neither is there a merges.txt")
    writer = gguf.GGUFWriter(None, "dflash")
    writer.add_tokenizer_model("gemma4" if is_gemma4 else "gpt2")
    if family.pre:
        writer.add_tokenizer_pre(family.pre)
    writer.add_token_list([text for text, _ in filled])
    if is_gemma4:
        writer.add_token_scores([_SCORE] * len(filled))
    writer.add_token_types([kind for _, kind in filled])
    if merges:
        writer.add_token_merges(merges)
    special.add_to_gguf(writer, quiet=True)
    if is_gemma4:
        writer.add_add_space_prefix(False)
        writer.kv_data[0].pop(gguf.Keys.Tokenizer.ADD_BOS, None)
        writer.add_add_bos_token(True)
    return [
        _key(name, stored.value, stored.type)
        for name, stored in writer.kv_data[0].items()
        if name.startswith("tokenizer.")
    ]


def _check(keys: list[Key], folder: Path) -> None:
    """Refuse texts that GGUF cannot hold, or that llama.cpp would abort on."""
    for key in keys:
        values = key.value if isinstance(key.value, (list, tuple)) else [key.value]
        try:
            "".join(value for value in values if isinstance(value, str)).encode("utf-8")
        except UnicodeEncodeError:
            raise FileError(f"{folder}: {key.name} has half a surrogate pair in it") from None
    fault = vocabulary_fault(
        {key.name: key.value for key in keys}, {key.name: key.type_name for key in keys}
    )
    if fault:
        raise FileError(f"{folder}: the tokenizer's files give no usable vocabulary: {fault}")


def _key(name: str, value: Any, kind: GGUFValueType) -> Key:
    if kind != GGUFValueType.ARRAY:
        return Key(name, value, kind)
    values = tuple(int(item) if isinstance(item, TokenType) else item for item in value)
    if name == gguf.Keys.Tokenizer.CHAT_TEMPLATES:
        values = tuple(sorted(values))  # comes from a set
    return Key.of(name, values)


def _json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.exists():
        return {}
    return read_json(path, TOKENIZER_LIMIT, strict=False)


def _bpe_tokens(files: _Files, family: TokenizerFamily) -> _Tokens:
    where = str(files.folder / "tokenizer.json")
    check_pattern(family, files.tokenizer.get("pre_tokenizer"), where)
    vocabulary = _model_vocabulary(files)
    letters = _byte_letters(files.tokenizer.get("decoder"))
    tokens = {number: (text, TokenType.NORMAL) for text, number in vocabulary.items()}
    for number, token in _added_tokens(files, vocabulary).items():
        tokens[number] = _added_token(token, letters)
    return tokens


def _rank_tokens(files: _Files, ranks: dict[bytes, int]) -> _Tokens:
    named = {number: token.text for number, token in _configured_tokens(files)}
    tokens = {
        rank: (tiktoken_ranks.as_text(token), TokenType.NORMAL) for token, rank in ranks.items()
    }
    for number in range(len(ranks), len(ranks) + _RESERVED_TOKENS):
        text = named.get(number, f"<|reserved_token_{number}|>")
        tokens[number] = text, TokenType.CONTROL
    _check_size(files, "tiktoken.model", len(tokens))
    return tokens


def _gemma4_tokens(files: _Files) -> _Tokens:
    vocabulary = _model_vocabulary(files)
    special = set(_special_texts(files.settings))
    tokens: _Tokens = {}
    for number, token in _added_tokens(files, vocabulary).items():
        is_special = token.text in special
        tokens[number] = token.text, TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    for text, number in vocabulary.items():
        tokens[number] = text, _gemma4_kind(text, text in special)
    for number, (text, _) in tokens.items():
        if text in _VISIBLE:
            tokens[number] = text, TokenType.USER_DEFINED
    return tokens


def _gemma4_kind(text: str, special: bool) -> TokenType:
    if _BYTE_TOKEN.fullmatch(text):
        return TokenType.BYTE
    return TokenType.CONTROL if special else TokenType.NORMAL


def _model_vocabulary(files: _Files) -> dict[str, int]:
    """Token to id, of tokenizer.json without the added tokens."""
    model = files.tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise files.fail("tokenizer.json", f"has a model of type {kind!r}, expected 'BPE'")
    vocabulary = model.get("vocab")
    if (
        not isinstance(vocabulary, dict)
        or not vocabulary
        or not all(map(_is_id, vocabulary.values()))
    ):
        raise files.fail("tokenizer.json", "model.vocab does not map tokens to ids")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise files.fail("tokenizer.json", "model.vocab gives two tokens the same id")
    _check_size(files, "tokenizer.json", max(vocabulary.values()) + 1)
    return vocabulary


def _added_tokens(files: _Files, vocabulary: dict[str, int]) -> dict[int, _Added]:
    """Id to added token, by tokenizer.json and then by tokenizer_config.json."""
    ids = dict(vocabulary)
    texts = {token: text for text, token in vocabulary.items()}
    added: dict[int, _Added] = {}
    special = set(_special_texts(files.settings))

    def add(file: str, number: int, token: _Added) -> None:
        if ids.setdefault(token.text, number) != number or (
            texts.setdefault(number, token.text) != token.text
        ):
            raise files.fail(
                file,
                f"id {number} is token {token.text!r}, and by tokenizer.json it is "
                f"{texts.get(number)!r}",
            )
        added[number] = token

    for number, token in _listed_tokens(files):
        add("tokenizer.json", number, token)
    for number, token in _configured_tokens(files):
        is_special = token.special or token.text in special
        add("tokenizer_config.json", number, _Added(token.text, is_special, token.normalized))
    known = {token.text for token in added.values()}
    for text in special - known:
        if text in vocabulary:
            added[vocabulary[text]] = _Added(text, special=True, normalized=False)
    _check_size(files, "tokenizer.json", max(added, default=-1) + 1)
    return added


def _listed_tokens(files: _Files) -> Iterator[tuple[int, _Added]]:
    entries = files.tokenizer.get("added_tokens") or []
    if not isinstance(entries, list):
        raise files.fail("tokenizer.json", "added_tokens is no list")
    for entry in entries:
        number = entry.get("id") if isinstance(entry, dict) else None
        yield _entry(files, "tokenizer.json", number, entry)


def _configured_tokens(files: _Files) -> Iterator[tuple[int, _Added]]:
    entries = files.settings.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise files.fail("tokenizer_config.json", "added_tokens_decoder is no object")
    for number, entry in entries.items():
        token = int(number) if number.isdecimal() else None
        yield _entry(files, "tokenizer_config.json", token, entry)


def _entry(files: _Files, file: str, number: object, entry: object) -> tuple[int, _Added]:
    text = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(text, str) or not _is_id(number):
        raise files.fail(file, f"added token {str(entry)[:80]} lacks an id or its content")
    assert isinstance(number, int)
    special = entry.get("special") is True
    return number, _Added(text, special, entry.get("normalized", not special) is True)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_size(files: _Files, file: str, n_tokens: int) -> None:
    if n_tokens > files.n_vocab:
        raise files.fail(
            file,
            f"has a token with id {n_tokens - 1}, and the drafter's vocabulary ends at "
            f"{files.n_vocab - 1}; give the target that the drafter was trained for",
        )


def _added_token(token: _Added, letters: dict[str, int] | None) -> tuple[str, TokenType]:
    text = token.text
    if not token.normalized and letters and all(letter in letters for letter in text):
        text = bytes(letters[letter] for letter in text).decode("utf-8", "replace")
    if token.special or _looks_special(text):
        return text, TokenType.CONTROL
    return text.replace("\u2581", " "), TokenType.USER_DEFINED


def _looks_special(text: str) -> bool:
    """Some models do not mark their control tokens as special."""
    return (
        text in _LOOK_SPECIAL
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _byte_letters(decoder: object) -> dict[str, int] | None:
    """Letter to byte, if the decoder reads every token's text as bytes."""
    if not isinstance(decoder, dict):
        return None
    parts = decoder.get("decoders")
    for part in parts if isinstance(parts, list) else [decoder]:
        if isinstance(part, dict) and part.get("type") == "ByteLevel":
            return {letter: byte for byte, letter in bytes_to_unicode().items()}
    return None


def _special_texts(settings: dict[str, Any]) -> Iterator[str]:
    """The tokens that tokenizer_config.json names for a purpose."""
    specific = settings.get("model_specific_special_tokens")
    values = [value for name, value in settings.items() if name.endswith("_token")]
    values += specific.values() if isinstance(specific, dict) else []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(name)
        if isinstance(more, (list, dict)):
            values += more.values() if isinstance(more, dict) else more
    for value in values:
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield text


def _special_tokens(files: _Files, *, load_merges: bool) -> gguf.SpecialVocab:
    try:
        special = gguf.SpecialVocab(files.folder, load_merges=load_merges, n_vocab=files.n_vocab)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise FileError(f"{files.folder}: its tokenizer files cannot be read: {error!r}") from None
    if any(step.get("type") == "ByteLevel" for step in _post_processors(files)):
        # this step adds no tokens, which our version of the package does not know
        special.add_special_token.setdefault("bos", False)
        special.add_special_token.setdefault("eos", False)
    return special


def _post_processors(files: _Files) -> list[dict[str, Any]]:
    step = files.tokenizer.get("post_processor")
    if not isinstance(step, dict):
        return []
    steps = step.get("processors", [step])
    return [part for part in steps if isinstance(part, dict)] if isinstance(steps, list) else []
