"""`--compare` compares drafts with plain decoding, and trees with chains as well."""

import json
import re
import subprocess

import pytest

from command_line import run_here

ARGUMENTS = (
    *("complete", "--compare", "--threads", "1", "--gpu-layers", "0", "--ctx", "512"),
    *("--kv-type", "q8_0", "-n", "32", "def is_prime(n):"),
)


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(*ARGUMENTS, *arguments)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("width", ["16", "32"])
def test_trees_are_held_against_plain_decoding_and_chains(width: str) -> None:
    """Also where they are wider than any chain."""
    done = compare("--draft-shape", "tree", "--draft-width", width)
    assert done.returncode == 0, done.stderr
    told = done.stderr
    assert re.search(r"asked again: [\d.]+ tokens/s; plain decoding: [\d.]+ tokens/s; draft", told)
    assert re.search(r"tokens/s; drafting was [\d.]+ times as fast on", told)
    assert re.search(r"chains: [\d.]+ tokens/s; drafting trees was [\d.]+ times as fast on", told)
    assert ", by the drafter" in told and "drafting is" not in told
    assert told.splitlines()[-1].startswith("one prompt is no verdict: `dflash-local bench`")
    trees = re.search(r"^trees: ([\d.]+) tokens per round of (.*)$", told, re.M)
    chains = re.search(r"^chains: ([\d.]+) tokens per round of (.*) drafts$", told, re.M)
    assert trees and chains
    assert float(trees[1]) >= float(chains[1]) >= 1
    assert re.fullmatch(r"[\d.]+ drafts, [\d.]+ deep, in [\d.]+ branches; .*", trees[2])


def test_an_answer_without_drafts_says_nothing_of_them() -> None:
    done = compare("--draft-width", "16", "-n", "1")
    assert "nothing was drafted on this prompt; the same tokens" in done.stderr
    assert "times as fast" not in done.stderr


@pytest.mark.slow
def test_json_has_both() -> None:
    done = compare("--draft-shape", "tree", "--draft-width", "16", "--json")
    compared = json.loads(done.stdout)["compare"]
    assert compared["ratio"] > 0 and compared["chain"]["ratio"] > 0
    drafts = compared["chain"]["drafts"]
    assert drafts["branches"] == 1 and drafts["depth"] == drafts["nodes"]
