"""The prompt for filling a gap: its layout, and what is left out where not all fits."""

import random
from collections.abc import Iterator

import pytest

import mini_pair
from dflash_local import Model, load
from dflash_local.server.answering.infill_prompt import Gap, OtherText, infill_prompt
from dflash_local.target_model.vocabulary import Vocabulary
from gguf_files import UINT32, changed

PREFIX = "def area(width, height):\n"
SUFFIX = "\n\nprint(area(2, 3))\n"
WIDE = 4096
"""Room for everything."""


@pytest.fixture(scope="module")
def vocabulary(model: Model) -> Vocabulary:
    return model.target.vocabulary


@pytest.fixture(scope="module")
def repository_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    """That of a model with tokens for repositories and files, as Qwen2.5-Coder has them."""
    names = ("tokenizer.ggml.fim_rep_token_id", "tokenizer.ggml.fim_sep_token_id")
    keys = {name: (8190 + i, UINT32, None) for i, name in enumerate(names)}
    path = tmp_path_factory.mktemp("repository") / "target.gguf"
    changed(mini_pair.pair()[0], path, keys=keys)
    with load(path, n_ctx=64, n_gpu_layers=0, n_threads=1, quiet=True) as loaded:
        yield loaded.target.vocabulary


def spelled(vocabulary: Vocabulary, gap: Gap, room: int = WIDE) -> str:
    return vocabulary.detokenize(infill_prompt(vocabulary, gap, room=room), special=True)


def code(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(f"value_{i} = {rng.randrange(1000)}\n" for i in range(n))


def test_the_prompt_of_a_gap(vocabulary: Vocabulary) -> None:
    gap = Gap(PREFIX, SUFFIX, "    return ")
    expected = f"<|fim_prefix|>{PREFIX}    return <|fim_suffix|>{SUFFIX}<|fim_middle|>"
    assert spelled(vocabulary, gap) == expected
    others = [OtherText(text=text) for text in ("a = 1\n", "b = 2\n")]
    between = "\n\n--- snippet ---\n\n"
    assert (
        spelled(vocabulary, Gap(PREFIX, SUFFIX, "    return ", others))
        == f"{between}a = 1\n{between}b = 2\n{expected}"
    )


def test_the_prompt_of_a_model_that_knows_of_files(repository_vocabulary: Vocabulary) -> None:
    repository, file = (repository_vocabulary.name(token) for token in (8190, 8191))
    others = (
        OtherText(text="a = 1\n", filename="src/a.py"),
        OtherText(text="b = 2\n", filename="b.py"),
    )
    assert spelled(repository_vocabulary, Gap(PREFIX, SUFFIX, "", others)) == (
        f"{repository}myproject\n{file}src/a.py\na = 1\n{file}b.py\nb = 2\n{file}filename\n"
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    )


def test_names_of_control_tokens_in_code_are_text(vocabulary: Vocabulary) -> None:
    marks = vocabulary.infill
    assert marks is not None
    tokens = infill_prompt(vocabulary, Gap("x = '<|fim_middle|>'\n", "<|im_end|>\n"), room=WIDE)
    assert tokens.count(marks.middle) == 1
    assert vocabulary.tokenize("<|im_end|>")[0] not in tokens


def test_a_prompt_keeps_to_its_room(vocabulary: Vocabulary) -> None:
    rng = random.Random(1)
    for _ in range(40):
        texts = [code(rng.randrange(400), rng.randrange(9)) for _ in range(4)]
        others = (
            OtherText(text=texts[2], filename="c.py"),
            OtherText(text=texts[3], filename="d.py"),
        )
        room = rng.randrange(16, 3000)
        tokens = infill_prompt(vocabulary, Gap(texts[0], texts[1], "x", others), room=room)
        assert len(tokens) <= room


def test_what_does_not_fit_is_what_is_farthest_from_the_cursor(vocabulary: Vocabulary) -> None:
    others = tuple(OtherText(text=code(20, i), filename=f"{i}.py") for i in range(5))
    prefix, suffix = code(2000, 7), code(2000, 8)
    text = spelled(vocabulary, Gap(prefix, suffix, "begun", others), room=1600)
    extra, _, rest = text.partition("<|fim_prefix|>")
    before, _, after = rest.removesuffix("<|fim_middle|>").partition("<|fim_suffix|>")
    assert (prefix + "begun").endswith(before)
    assert suffix.startswith(after)
    assert len(before) > len(after) > 100
    assert "".join(other.text for other in others).endswith(others[-1].text)
    assert others[-1].text in extra
    assert others[0].text not in extra


def test_prompts_of_somebody_who_types_begin_alike(vocabulary: Vocabulary) -> None:
    """Of a hundred keys one at most moves the beginning; all others find it in the cache."""
    prefix, suffix, typed = code(2000), code(50, 3), "total = combine(first, second)\n" * 4
    moved = 0
    last: list[int] = []
    for n in range(100):
        tokens = infill_prompt(vocabulary, Gap(prefix, suffix, typed[:n]), room=1600)
        moved += bool(last) and tokens[:500] != last[:500]
        last = tokens
    assert moved <= 1
