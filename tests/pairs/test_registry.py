"""The registry of pairs."""

from pathlib import Path

import pytest

from dflash_local.errors import InputError
from dflash_local.pairs import find, registry
from dflash_local.pairs.address import HubAddress, NamedPair, read_address


@pytest.fixture(autouse=True)
def without_the_tests_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENVIRONMENT)


def test_each_name_means_one_pair() -> None:
    names = [name.casefold() for entry in registry.entries() for name in entry.names]
    assert len(names) == len(set(names))
    for entry in registry.entries():
        for name in entry.names:
            assert read_address(name) == NamedPair(entry), name


def test_each_place_can_be_read() -> None:
    for entry in registry.entries():
        drafter = read_address(entry.drafter)
        assert isinstance(drafter, Path if entry.name == registry.USUAL else HubAddress)
        for place in filter(None, (entry.gguf, entry.with_heads)):
            assert isinstance(read_address(place), HubAddress), entry.name


def test_a_pair_whose_gguf_files_are_not_known_says_what_to_do() -> None:
    [entry] = [entry for entry in registry.entries() if entry.gguf is None]
    with pytest.raises(InputError, match=r"give its file with --target, and .* with --draft"):
        find.find_pair(entry.name, say=str)


def test_ones_own_file_adds_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(registry.entries())
    own = tmp_path / "own.toml"
    own.write_text(
        '[mine]\ngguf = "me/M-GGUF"\ndrafter = "me/D"\ntokens_per_round = 5\n'
        '[qwen3-8b]\ndrafter = "me/Q"\n'
    )
    monkeypatch.setenv(registry.ENVIRONMENT, str(own))
    assert len(registry.entries()) == before + 1
    replaced = registry.named("qwen3-8b")
    assert replaced and replaced[0].drafter == "me/Q"


def test_a_name_stands_for_the_files_with_heads_where_these_are_to_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.toml"
    for name in ("plain.gguf", "heads.gguf", "drafter.gguf"):
        (tmp_path / name).touch()
    files = 'gguf = "plain.gguf"\ndrafter = "drafter.gguf"\n'
    own.write_text(f'[both]\n{files}with_heads = "heads.gguf"\n[one]\n{files}')
    monkeypatch.setenv(registry.ENVIRONMENT, str(own))
    for name, draft, expected in (
        ("both", None, "plain.gguf"),
        ("both", "mtp", "heads.gguf"),
        ("both", "none", "plain.gguf"),
        ("one", "mtp", "plain.gguf"),
    ):
        assert find.find_pair(name, draft, say=str).target == tmp_path / expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[a\n", "is not TOML"),
        ('[a]\ngguf = "b/c"\n', r"\[a\] has no drafter"),
        ('[a.b]\ndrafter = "b/c"\n', r"\[a\] has no drafter.*quotes"),
        ('[a]\ndrafter = "b/c"\ncolour = 1\n', r"\[a\] colour: no such key; the keys are"),
        ('[a]\ndrafter = "b/c"\nthinking = "no"\n', r"\[a\] thinking: 'no' is not"),
        ('[a]\ndrafter = "b/c"\ntraining_length = 0\n', "training_length: 0 is not 1 or more"),
        ('[a]\ndrafter = "b/c"\nsampling = { heat = 1 }\n', "heat is no sampling option"),
        ('[a]\ndrafter = "b/c"\nsampling = { temperature = "x" }\n', r"\[a\] sampling: te.*'x'"),
        ('[a]\ndrafter = "b/c"\nsampling = { temperature = -1 }\n', r"\[a\] sampling: .*-1; give"),
        ('[a]\ndrafter = "b/c"\nsampling = { top_p = true }\n', r"\[a\] sampling: top_p is True"),
        ('[a]\ndrafter = "b/c"\ntokens_per_round = "x"\n', r"\[a\] tokens_per_round: 'x' is not"),
        ('[a]\ndrafter = "b/c"\nthinking_sampling = { heat = 1 }\n', "thinking_sampling: heat"),
    ],
)
def test_a_file_that_is_not_right(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=named) as refusal:
        registry.read(file)
    assert str(file) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_target_that_cannot_be_drafted_for_is_run_alone() -> None:
    untapped = read_address("glm-5.1")
    model = find.Files(["/models/glm-5.1.gguf"])
    assert find.find_drafter(None, untapped, model) is None
