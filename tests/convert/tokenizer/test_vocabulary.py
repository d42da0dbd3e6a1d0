"""A drafter's tokenizer keys are its target's, whether from GGUF or from Hugging Face files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from dflash_local.convert.key import Key
from dflash_local.convert.tokenizer.pretokenizers import FAMILIES
from dflash_local.convert.tokenizer.tiktoken_ranks import as_text
from dflash_local.convert.tokenizer.vocabulary import tokenizer_keys
from dflash_local.convert.writer import write_gguf
from dflash_local.errors import FileError, InputError
from dflash_local.gguf.file import GgufFile
from tokenizer_files import Files, gemma4_files, hf_files, rank_files, source, split_by
from vocab_only import vocabulary_of

N_VOCAB, MASK = 8192, 8191
TEXT = "def f(x):\n    return 'naïve ☃'  # 12345 don't\n\n\t<|im_end|>"


def by_name(keys: list[Key]) -> dict[str, Any]:
    return {key.name.removeprefix("tokenizer.").removeprefix("ggml."): key.value for key in keys}


def read_back(keys: list[Key], path: Path) -> GgufFile:
    architecture = Key.of("general.architecture", "llama")
    write_gguf(path, [architecture, *keys], [], lambda plan, start, stop: plan.values)
    return GgufFile.open(path)


def tokenized(path: Path, text: str) -> tuple[list[int], str]:
    """llama.cpp's tokens of `text` with the vocabulary in `path`, and these back in text."""
    with vocabulary_of(path) as vocabulary:
        tokens = vocabulary.tokenize(text, add_special=False)
        return tokens, vocabulary.detokenize(tokens)


@pytest.fixture(scope="session")
def target(pair: tuple[Path, Path]) -> GgufFile:
    return GgufFile.open(pair[0])


@pytest.fixture
def files(target: GgufFile) -> Files:
    return hf_files(target)


def expected(pair: tuple[Path, Path]) -> dict[str, tuple[Any, str]]:
    """The tokenizer keys of the drafter that llama.cpp's converter wrote, with their types."""
    shipped = GgufFile.open(pair[1])
    return {
        name: (value, shipped.value_types[name])
        for name, value in shipped.metadata.items()
        if name.startswith("tokenizer.")
    }


@pytest.mark.parametrize("layout", ["GGUF", "HF"])
def test_keys_are_those_of_llama_cpps_converter(
    layout: str, pair: tuple[Path, Path], target: GgufFile, files: Files, tmp_path: Path
) -> None:
    given = target if layout == "GGUF" else source(tmp_path, files)
    keys = tokenizer_keys(given, n_vocab=N_VOCAB, mask_token_id=MASK)
    written = read_back(keys, tmp_path / "keys.gguf")
    found = {name: (written.metadata[name], written.value_types[name]) for name in expected(pair)}
    assert found == expected(pair)
    assert [key.name for key in keys] == list(expected(pair))


def test_texts_tokenize_as_the_target_does(files: Files, target: GgufFile, tmp_path: Path) -> None:
    keys = tokenizer_keys(source(tmp_path, files), n_vocab=N_VOCAB, mask_token_id=MASK)
    read_back(keys, tmp_path / "keys.gguf")
    assert tokenized(tmp_path / "keys.gguf", TEXT) == tokenized(target.path, TEXT)


def test_merges_may_stand_in_their_old_places(files: Files, tmp_path: Path) -> None:
    model = files["tokenizer.json"]["model"]
    pairs = [" ".join(merge) for merge in model["merges"]]
    model["merges"] = pairs
    keys = tokenizer_keys(source(tmp_path, files), n_vocab=N_VOCAB, mask_token_id=MASK)
    assert by_name(keys)["merges"] == tuple(pairs)
    del model["merges"]
    files["merges.txt"] = ("#version: 0.2\n" + "\n".join(pairs) + "\n").encode()
    keys = tokenizer_keys(source(tmp_path, files), n_vocab=N_VOCAB, mask_token_id=MASK)
    assert by_name(keys)["merges"] == tuple(pairs)


def test_ids_without_a_token_are_filled(files: Files, tmp_path: Path) -> None:
    keys = by_name(tokenizer_keys(source(tmp_path, files), n_vocab=8200, mask_token_id=8195))
    assert len(keys["tokens"]) == len(keys["token_type"]) == 8200
    assert keys["tokens"][N_VOCAB:] == tuple(f"[PAD{i}]" for i in range(N_VOCAB, 8200))
    assert keys["token_type"][N_VOCAB:] == (TokenType.UNUSED,) * 8
    assert keys["mask_token_id"] == 8195


def test_added_tokens_get_the_type_that_their_files_say(files: Files, tmp_path: Path) -> None:
    """tokenizer_config.json has the last word; a token that looks like a control token is one."""
    plain = {"special": False, "normalized": False}
    files["tokenizer.json"]["added_tokens"] += [
        {"id": 8192, "content": "<think>", **plain},
        {"id": 8193, "content": "<|looks_special|>", **plain},
        {"id": 8194, "content": "\u2581two\u2581words", "special": False, "normalized": True},
        {"id": 8195, "content": "<later>", **plain},
        {"id": 8196, "content": "bytes\u0120\u00c3\u00a9", **plain},
    ]
    files["tokenizer_config.json"]["added_tokens_decoder"]["8195"] = {
        "content": "<later>",
        "special": True,
    }
    keys = by_name(tokenizer_keys(source(tmp_path, files), n_vocab=8197, mask_token_id=MASK))
    assert list(zip(keys["tokens"], keys["token_type"], strict=True))[8192:] == [
        ("<think>", TokenType.USER_DEFINED),
        ("<|looks_special|>", TokenType.CONTROL),
        (" two words", TokenType.USER_DEFINED),
        ("<later>", TokenType.CONTROL),
        ("bytes \u00e9", TokenType.USER_DEFINED),
    ]


def test_template_and_start_token_come_from_their_files(files: Files, tmp_path: Path) -> None:
    del files["tokenizer_config.json"]["chat_template"]
    files["chat_template.jinja"] = b"{{ messages }}"
    files["tokenizer_config.json"]["bos_token"] = "<|im_start|>"
    files["tokenizer.json"]["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
            },
        ],
    }
    del files["tokenizer_config.json"]["add_bos_token"]
    keys = by_name(tokenizer_keys(source(tmp_path, files), n_vocab=N_VOCAB, mask_token_id=MASK))
    assert keys["chat_template"] == "{{ messages }}"
    assert keys["bos_token_id"] == 8185
    assert (keys["add_bos_token"], keys["add_eos_token"]) == (True, False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("model_type", "pre"),
    [
        ("qwen3_moe", "qwen2"),
        ("qwen3_5", "qwen35"),
        ("llama", "llama-bpe"),
        ("gpt_oss", "gpt-4o"),
    ],
)
def test_pre_tokenizer_is_that_of_the_family(
    model_type: str, pre: str, files: Files, tmp_path: Path
) -> None:
    files["config.json"] = {"model_type": "of_no_use", "text_config": {"model_type": model_type}}
    files["tokenizer.json"]["pre_tokenizer"] = split_by(FAMILIES[model_type].pattern)
    keys = tokenizer_keys(source(tmp_path, files), n_vocab=N_VOCAB, mask_token_id=MASK)
    assert by_name(keys)["pre"] == pre
    read_back(keys, tmp_path / "keys.gguf")
    assert tokenized(tmp_path / "keys.gguf", TEXT)[1] == TEXT.removesuffix("<|im_end|>")


def test_glm_takes_its_roles_from_tokens(files: Files, tmp_path: Path) -> None:
    names = ("[gMASK]", "<|user|>", "<|observation|>")
    files["config.json"]["model_type"] = "glm4_moe"
    files["tokenizer.json"]["pre_tokenizer"] = split_by(FAMILIES["glm4_moe"].pattern)
    with pytest.raises(FileError, match=r"tokenizer\.json: has no token '\[gMASK\]'"):
        tokenizer_keys(source(tmp_path, files), n_vocab=N_VOCAB, mask_token_id=MASK)
    for number, name in enumerate(names, start=N_VOCAB):
        entry = {"id": number, "content": name, "special": True}
        files["tokenizer.json"]["added_tokens"].append(entry)
    keys = by_name(tokenizer_keys(source(tmp_path, files), n_vocab=8195, mask_token_id=MASK))
    assert keys["pre"] == "glm4"
    assert [keys[f"{role}_token_id"] for role in ("bos", "eot", "eom")] == [8192, 8193, 8194]
    assert keys["unknown_token_id"] == 8184
    assert keys["eos_token_id"] == 8186


def test_ranks_become_tokens_and_merges(tmp_path: Path) -> None:
    keys = tokenizer_keys(source(tmp_path, rank_files()), n_vocab=600, mask_token_id=599)
    found = by_name(keys)
    letters = [as_text(part) for part in (b" ", "\u4f60".encode()[:2], "\u4f60".encode()[2:])]
    first, second = (as_text(bytes([byte])) for byte in "\u4f60".encode()[:2])
    assert found["merges"] == (
        "h e",
        "l l",
        "he ll",
        "hell o",
        f"{letters[0]} w",
        f"{first} {second}",
        f"{letters[1]} {letters[2]}",
    )
    assert found["tokens"][263:266] == ("[BOS]", "[EOS]", "<|reserved_token_265|>")
    assert found["tokens"][518:520] == ("<|reserved_token_518|>", "[PAD519]")
    assert found["token_type"][262:264] == (TokenType.NORMAL, TokenType.CONTROL)
    assert (found["model"], found["pre"]) == ("gpt2", "kimi-k2")
    assert (found["bos_token_id"], found["eos_token_id"]) == (263, 264)
    assert found["chat_template"] == "{{ messages }}"
    read_back(keys, tmp_path / "keys.gguf")
    tokens, text = tokenized(tmp_path / "keys.gguf", "hello w\u4f60[EOS]")
    assert (tokens, text) == ([259, 260, 262, 264], "hello w\u4f60")


def test_gemma_4_has_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    keys = tokenizer_keys(source(tmp_path, gemma4_files()), n_vocab=272, mask_token_id=0)
    found = by_name(keys)
    assert found["model"] == "gemma4"
    assert "pre" not in found
    assert found["scores"] == (-1000.0,) * 272
    assert found["token_type"][:7] == (TokenType.CONTROL,) * 5 + (
        TokenType.USER_DEFINED,  # a chat parser must see it
        TokenType.CONTROL,
    )
    assert found["token_type"][7:9] == (TokenType.BYTE,) * 2
    assert found["token_type"][263:] == (TokenType.NORMAL,) * 6 + (TokenType.UNUSED,) * 3
    assert (found["add_bos_token"], found["add_space_prefix"]) == (True, False)
    assert [found[f"{role}_token_id"] for role in ("bos", "eos", "padding")] == [2, 1, 0]
    read_back(keys, tmp_path / "keys.gguf")
    assert tokenized(tmp_path / "keys.gguf", "hi hi<eos>")[0] == [266, 267, 1]


def test_target_of_another_size_is_refused(target: GgufFile, files: Files, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds 8192 tokens, and the drafter is for .* with 9000"):
        tokenizer_keys(target, n_vocab=9000, mask_token_id=5)
    with pytest.raises(FileError, match=r"a token with id 8183, and .* vocabulary ends at 7999"):
        tokenizer_keys(source(tmp_path, files), n_vocab=8000, mask_token_id=5)


@pytest.mark.parametrize("mask", [-1, N_VOCAB])
def test_mask_token_outside_the_vocabulary_is_refused(mask: int, target: GgufFile) -> None:
    with pytest.raises(InputError, match=f"has id {mask}, and the vocabulary ends at 8191"):
        tokenizer_keys(target, n_vocab=N_VOCAB, mask_token_id=mask)


def change(name: str, **fields: Any) -> Callable[[Files], None]:
    return lambda files: files[name].update(fields)


def change_model(**fields: Any) -> Callable[[Files], None]:
    return lambda files: files["tokenizer.json"]["model"].update(fields)


@pytest.mark.one_in(21)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            change("config.json", model_type="mistral"),
            r"config\.json: the tokenizer of model_type 'mistral' is not known, expected one of "
            r"gemma4, .*; give the target as a GGUF file",
        ),
        (change("config.json", model_type=["qwen3"]), r"model_type \['qwen3'\] is not known"),
        (
            change("tokenizer.json", pre_tokenizer=split_by(r"\p{L}+")),
            r"splits by '\\\\p\{L\}\+', expected that of llama\.cpp's 'qwen2'",
        ),
        (change("tokenizer.json", pre_tokenizer=None), "splits by no pattern, expected"),
        (change_model(type="Unigram"), "a model of type 'Unigram', expected 'BPE'"),
        (change("tokenizer.json", model=None), "a model of type None"),
        (change_model(vocab=["a"]), r"model\.vocab does not map tokens to ids"),
        (change_model(vocab={"a": "0"}), r"model\.vocab does not map tokens to ids"),
        (change_model(vocab={"a": 0, "b": 0}), "gives two tokens the same id"),
        (change_model(merges=[]), "has no merges, and neither is there a merges.txt"),
        (change_model(merges=[7]), "tokenizer files cannot be read"),
        (change("tokenizer.json", added_tokens={"a": 1}), "added_tokens is no list"),
        (change("tokenizer.json", added_tokens=[{"content": "a"}]), "lacks an id or its content"),
        (
            change("tokenizer_config.json", added_tokens_decoder={"5": {"content": "<|new|>"}}),
            r"tokenizer_config\.json: id 5 is token '<\|new\|>', and by tokenizer\.json it is '&'",
        ),
        (
            change("tokenizer_config.json", added_tokens_decoder={"x": {"content": "a"}}),
            "lacks an id or its content",
        ),
        (
            change("tokenizer_config.json", chat_template="\ud800"),
            r"tokenizer\.chat_template has half a surrogate pair",
        ),
        (
            change_model(vocab={"[PAD1]": 0}),
            r"no usable vocabulary: token '\[PAD1\]' has two ids, 0 and 1",
        ),
        (lambda files: files.update({"tokenizer.json": b"{"}), r"tokenizer\.json: not JSON"),
        (lambda files: files.update({"config.json": b"[]"}), "holds a list, expected a JSON obj"),
        (lambda files: files.pop("tokenizer.json"), r"has no tokenizer\.json"),
        (lambda files: files.pop("config.json"), r"config\.json: no such file"),
    ],
)
def test_files_that_do_not_say_it_are_refused(
    spoil: Callable[[Files], None], message: str, files: Files, tmp_path: Path
) -> None:
    spoil(files)
    with pytest.raises(FileError, match=message) as caught:
        tokenizer_keys(source(tmp_path, files), n_vocab=N_VOCAB, mask_token_id=MASK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (b"", "the ranks do not count from 0"),
        (b"aGU= 1\n", "the ranks do not count from 0"),
        (b"aGU= 0\nnonsense\n", "line 2 is b'nonsense', expected a base64 token"),
        (b"!!!! 0\n", "line 1 is b'!!!! 0', expected a base64 token"),
    ],
)
def test_ranks_that_are_none_are_refused(ranks: bytes, message: str, tmp_path: Path) -> None:
    files = rank_files() | {"tiktoken.model": ranks}
    with pytest.raises(FileError, match=message):
        tokenizer_keys(source(tmp_path, files), n_vocab=600, mask_token_id=5)
