"""Sampling by llama.cpp's chains: reproducible, true to its settings, and safe to get wrong."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_local.errors import BackendError, ClosedError, GrammarError, InputError
from dflash_local.sampling.grammar import Grammars
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler
from dflash_local.target_model.vocabulary import Vocabulary
from given_rows import GivenRows

Logits = NDArray[np.float32]

N_CTX = 512


class Vocab:
    """A vocabulary, and samplers and rows of logits for it."""

    def __init__(self, vocabulary: Vocabulary, grammars: Grammars) -> None:
        self.vocabulary = vocabulary
        self.grammars = grammars
        self.n = vocabulary.n_tokens
        self.ids = {self.piece(token): token for token in range(self.n)}
        self.is_end = vocabulary.ends_text

    def sampler(self, **settings: Any) -> Sampler:
        params = SamplingParams(**settings)
        params.validate(self.n)
        constraint = self.grammars.constraint(params)
        return Sampler(
            params, self.n, n_ctx=N_CTX, constraint=constraint, vocabulary=self.vocabulary
        )

    def row(self, likely: dict[bytes, float] | None = None) -> Logits:
        """Logits of zero, except for the given pieces."""
        logits = np.zeros(self.n, np.float32)
        for text, logit in (likely or {}).items():
            logits[self.ids[text]] = logit
        return logits

    def noise(self, seed: int, rows: int, scale: float = 3.0) -> list[Logits]:
        rng = np.random.default_rng(seed)
        return [(rng.normal(size=self.n) * scale).astype(np.float32) for _ in range(rows)]

    def piece(self, token: int) -> bytes:
        return self.vocabulary.piece(token, special=True)

    def write(self, rows: list[Logits], **settings: Any) -> tuple[bytes, bool]:
        """The text of one token per row, and whether it came to its end."""
        text = b""
        with self.sampler(**settings) as sampler:
            for row in rows:
                token = sampler.sample(row)
                if self.is_end(token):
                    return text, True
                text += self.piece(token)
        return text, False


@pytest.fixture(scope="module")
def vocab(vocabulary: Vocabulary, grammars: Grammars) -> Vocab:
    return Vocab(vocabulary, grammars)


def softmax(logits: Logits) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


# Greedy


@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 40))
def test_greedy_equals_llama_cpp_s_with_many_ties(vocab: Vocab, seed: int, levels: int) -> None:
    row = np.random.default_rng(seed).integers(-levels, levels, vocab.n).astype(np.float32)
    with vocab.sampler() as plain, vocab.sampler(logit_bias={5: 0.0}) as chained:
        assert plain.sample(row) == chained.sample(row)


def test_nearly_no_temperature_is_greedy(vocab: Vocab) -> None:
    row = vocab.noise(1, 1)[0]
    with vocab.sampler(temperature=1e-30) as sampler:
        assert sampler.sample(row) == int(row.argmax())


# Seeds and laws


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.8, "repeat_penalty": 1.3, "presence_penalty": 0.5, "repeat_last_n": -1},
    {"temperature": 0.8, "grammar": 'root ::= [a-z ]+ ("." [0-9]*)?'},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_seed_one_text(vocab: Vocab, settings: dict[str, Any]) -> None:
    rows = vocab.noise(3, 24)
    first = vocab.write(rows, seed=11, **settings)
    assert vocab.write(rows, seed=11, **settings) == first
    assert vocab.write(rows, seed=12, **settings) != first


def test_a_seed_of_its_own_is_told_and_repeats_the_text(vocab: Vocab) -> None:
    rows = vocab.noise(4, 24)
    with vocab.sampler(temperature=1.0) as sampler:
        drawn = [sampler.sample(row) for row in rows]
    with vocab.sampler(temperature=1.0, seed=sampler.seed) as again:
        assert [again.sample(row) for row in rows] == drawn


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ({"top_k": 2, "top_p": 1.0, "min_p": 0.0}, {3, 30}),
        ({"top_k": 0, "top_p": 0.7, "min_p": 0.0}, {3, 30}),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.5}, {3, 30}),
        ({"top_k": 1}, {3}),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 1.2}, {3, 30}),
        ({"top_k": 3, "top_p": 1.0, "min_p": 0.0, "typical_p": 0.2}, {30}),
        ({"top_k": 3, "min_p": 0.0, "xtc_probability": 1.0, "xtc_threshold": 0.25}, {30, 300}),
    ],
)
def test_truncation_leaves_the_likeliest(
    vocab: Vocab, setting: dict[str, Any], allowed: set[int]
) -> None:
    row = np.full(vocab.n, -30.0, np.float32)
    row[[3, 30, 300]] = np.log([0.5, 0.3, 0.2])
    with vocab.sampler(temperature=1.0, seed=5, **setting) as sampler:
        assert {sampler.sample(row) for _ in range(200)} == allowed


def test_the_row_is_left_as_it_is(vocab: Vocab) -> None:
    row = vocab.noise(6, 1)[0]
    row.flags.writeable = False
    before = row.copy()
    for chosen in SETTINGS:
        with vocab.sampler(seed=1, logprobs=3, **chosen) as sampler:
            sampler.logprobs(row, sampler.sample(row))
    np.testing.assert_array_equal(row, before)


# Bias and penalties


def test_bias_adds_to_the_logits(vocab: Vocab) -> None:
    row = np.zeros(vocab.n, np.float32)
    row[7] = 2.0
    with vocab.sampler(logit_bias={9: 2.5}) as sampler:
        assert sampler.sample(row) == 9
    with vocab.sampler(logit_bias={7: -math.inf}) as sampler:
        assert sampler.sample(row) == 0


def test_penalties_see_the_last_tokens_of_prompt_and_answer(vocab: Vocab) -> None:
    row = np.zeros(vocab.n, np.float32)
    row[[7, 8, 9]] = 3.0, 2.9, 2.8
    with vocab.sampler(presence_penalty=1.0, repeat_last_n=2) as sampler:
        sampler.accept_prompt([7, 1, 2])  # token 7 is out of sight
        assert [sampler.sample(row) for _ in range(5)] == [7, 8, 9, 7, 8]
    with vocab.sampler(presence_penalty=1.0, repeat_last_n=-1) as sampler:
        sampler.accept_prompt([7, *range(100, 200)])
        assert [sampler.sample(row) for _ in range(3)] == [8, 9, 7]
    with vocab.sampler(presence_penalty=1.0, repeat_last_n=0) as sampler:
        assert [sampler.sample(row) for _ in range(3)] == [7, 7, 7]
    with vocab.sampler(repeat_penalty=1.1, repeat_last_n=2**31 - 1) as sampler:
        sampler.sample(row)  # its window costs no more than the context


def test_dry_penalises_what_would_go_on_with_a_repetition(vocab: Vocab) -> None:
    a, b, c, stop = (vocab.ids[text] for text in (b"a", b"b", b"c", b"*"))
    row = np.zeros(vocab.n, np.float32)
    row[[a, b, c]] = 2.0, 2.5, 1.0
    dry: dict[str, Any] = {"dry_multiplier": 1.0, "dry_allowed_length": 2}
    for prompt, drawn in (([a, b, c, b, a, b], b), ([c, a, b, c, a], a), ([c, a, stop, c, a], b)):
        with vocab.sampler(**dry) as sampler:
            sampler.accept_prompt(prompt)
            assert sampler.sample(row) == drawn, prompt
    with vocab.sampler(**dry, dry_penalty_last_n=0) as sampler:
        sampler.accept_prompt([c, a, b, c, a])
        assert sampler.sample(row) == b


def test_the_temperature_may_vary_with_the_entropy(vocab: Vocab) -> None:
    certain, open_ = np.full((2, vocab.n), -30.0, np.float32)
    certain[:3], open_[:3] = (3, 0, 0), (0.2, 0, 0)
    wide = {"temperature": 1.0, "seed": 5, "top_p": 1.0, "min_p": 0.0, "dynatemp_range": 1.0}
    for row, least, most in ((certain, 0.95, 1.0), (open_, 0.2, 0.5)):
        with vocab.sampler(**wide) as sampler:
            drawn = [sampler.sample(row) for _ in range(300)]
        assert least <= drawn.count(0) / 300 <= most


def test_forbidding_every_token_is_the_caller_s_error(vocab: Vocab) -> None:
    everything = dict.fromkeys(range(vocab.n), -math.inf)
    for temperature in (0.0, 0.8):
        with (
            vocab.sampler(temperature=temperature, logit_bias=everything) as sampler,
            pytest.raises(InputError, match="no token"),
        ):
            sampler.sample(vocab.row())


# Grammars


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_the_answer_is_of_the_grammar_and_ends_with_it(
    vocab: Vocab, temperature: float, seed: int
) -> None:
    rows = vocab.noise(seed, 40)
    settings = {"grammar": 'root ::= "[" [0-9]{1,4} ("," [0-9]{2})? "]"', "seed": seed}
    text, ended = vocab.write(rows, temperature=temperature, **settings)
    assert ended
    body = text.decode()
    assert body[0] + body[-1] == "[]"
    numbers = body[1:-1].split(",")
    assert 1 <= len(numbers[0]) <= 4
    assert all(number.isdigit() for number in numbers)
    assert [len(number) for number in numbers[1:]] in ([], [2])


def test_a_grammar_changes_nothing_it_allows(vocab: Vocab) -> None:
    rows = vocab.noise(8, 12)
    for chosen in SETTINGS[:3]:
        free = vocab.write(rows, seed=3, **chosen)
        assert vocab.write(rows, seed=3, grammar="root ::= [^\\x00]*", **chosen) == free


def test_penalties_and_bias_hold_within_a_grammar(vocab: Vocab) -> None:
    row = vocab.row({b"a": 3.0, b"b": 2.5, b"c": 2.0, b"z": 9.0})
    text, _ = vocab.write(
        [row] * 3,
        grammar="root ::= [abc]+",
        presence_penalty=2.0,
        logit_bias={vocab.ids[b"b"]: -5.0},
    )
    assert text == b"aca"


def test_a_grammar_and_a_bias_may_leave_nothing(vocab: Vocab) -> None:
    banned = {token: -math.inf for piece, token in vocab.ids.items() if b"a" in piece}
    with (
        vocab.sampler(grammar='root ::= "a"', logit_bias=banned) as sampler,
        pytest.raises(GrammarError, match="no token"),
    ):
        sampler.sample(vocab.row())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_text_ends_even_if_its_ends_are_forbidden(vocab: Vocab, temperature: float) -> None:
    """Nothing else can follow, and an error would cost the text."""
    ends = dict.fromkeys(vocab.vocabulary.ends, -math.inf)
    rows = vocab.noise(3, 12)
    bound: dict[str, Any] = {"grammar": 'root ::= "a" [bc]{3} "d"?', "seed": 2}
    settings = {**bound, "temperature": temperature}
    text, ended = vocab.write(rows, logit_bias=ends, **settings)
    assert ended and text[:1] == b"a" and text[-1:] == b"d"  # what may go on goes on
    no_d = {token: -math.inf for piece, token in vocab.ids.items() if b"d" in piece}
    text, ended = vocab.write(rows, logit_bias={**ends, **no_d}, **settings)
    assert ended and len(text) == 4
    with (
        vocab.sampler(**settings, logit_bias=ends) as sampler,
        pytest.raises(BackendError, match="not finite"),
    ):
        sampler.sample(np.full(vocab.n, np.nan, np.float32))


def test_bytes_that_are_no_character_never_reach_the_grammar(vocab: Vocab) -> None:
    """E0 may begin a character, E0 80 may not: llama.cpp would read it as U+0000 and throw."""
    rows = [vocab.row({b"\xe0": 9.0})] + [vocab.row({b"\x80": 9.0})] * 2
    text, _ = vocab.write(rows, grammar=r"root ::= [\u0800-\u0fff]+")
    assert text[:1] == b"\xe0"
    assert 0x0800 <= ord(text[:3].decode()) <= 0x0FFF


def test_an_answer_does_not_end_within_a_character(vocab: Vocab) -> None:
    end = next(token for token in range(vocab.n) if vocab.is_end(token))
    row = vocab.row()
    row[end] = 9.0
    rows = [vocab.row({b"\xe0": 9.0}), row, row, row]
    text, ended = vocab.write(rows, grammar=r"root ::= [\u0800-\u0fff]*")
    assert ended
    assert len(text.decode()) == 1


def chain(n: int, body: str) -> str:
    """Rules of which each begins with the next, to a last one that may be empty."""
    rules = [f"r{i} ::= " + body.format(i + 1) for i in range(n)]
    return "\n".join([*rules, f'r{n} ::= "a" | ""', "root ::= r0"])


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('# a comment\nroot ::= ( # another\n  "\\"" | [\\]"] )+ "#"', '"#'),
        ('root ::= ("a"* )* "b"', "b"),
        ('root ::= list\nlist ::= "(" list ")" | "b" | list-2\nlist-2 ::= "c" list', "b"),
        ('root ::= .? [^a] "b"{2,2001}', "##bb"),
        ('root ::= (("" | "a")){0,3} "b"', "b"),
        ('root ::= root "b" | "b"', "b"),
        (chain(60, "r{0} | r{0}") + ' "b"', "b"),
        (chain(900, "r{0}") + ' "b"', "b"),
    ],
)
def test_unusual_grammars_work(vocab: Vocab, grammar: str, text: str) -> None:
    end = next(token for token in range(vocab.n) if vocab.is_end(token))
    row = vocab.row({b"b": 3.0, b'"': 2.0, b"#": 3.0})
    row[end] = 9.0
    assert vocab.write([row] * 12, grammar=grammar) == (text.encode(), True)


GBNF = st.text('ab"[]()|*+?{},0123:= \n.^-\\<>!root#', max_size=40)


@pytest.mark.slow
@given(tail=GBNF, seed=st.integers(0, 99))
def test_no_grammar_ends_the_process(vocab: Vocab, tail: str, seed: int) -> None:
    with contextlib.suppress(GrammarError):
        vocab.write(vocab.noise(seed, 6), grammar="root ::= " + tail, temperature=1.0, seed=seed)


# Log-probabilities


def test_logprobs_are_those_of_the_raw_logits(vocab: Vocab) -> None:
    row = vocab.noise(9, 1)[0]
    law = np.log(softmax(row))
    with vocab.sampler(temperature=0.3, seed=1, logprobs=5, logit_bias={3: 50.0}) as sampler:
        token = sampler.sample(row)
        found = sampler.logprobs(row, token)
    assert token == found.token == 3
    assert found.logprob == pytest.approx(law[3], abs=1e-9)
    assert [i for i, _ in found.top] == np.argsort(-law)[:5].tolist()
    assert [p for _, p in found.top] == pytest.approx(np.sort(law)[::-1][:5].tolist())


@pytest.mark.parametrize("n", [0, 1, 3, 8192])
def test_equal_alternatives_come_by_id(vocab: Vocab, n: int) -> None:
    n = min(n, vocab.n)
    with vocab.sampler(logprobs=n) as sampler:
        top = sampler.logprobs(np.zeros(vocab.n, np.float32), 0).top
    assert [i for i, _ in top] == list(range(n))
    assert all(p == pytest.approx(-math.log(vocab.n)) for _, p in top)


# What is wrong with it


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1}, {"temperature": NAN}, {"temperature": 1e9}, {"temperature": "hot"},
        {"temperature": None}, {"temperature": True}, {"top_k": -1}, {"top_k": 2**31},
        {"top_k": 1.5}, {"top_p": 0}, {"top_p": 1.01}, {"top_p": NAN}, {"min_p": -0.1},
        {"min_p": 1.1}, {"repeat_penalty": 0}, {"repeat_penalty": -1}, {"repeat_penalty": INF},
        {"repeat_last_n": -2}, {"repeat_last_n": 2**31}, {"presence_penalty": NAN},
        {"frequency_penalty": INF}, {"seed": -1}, {"seed": 2**32 - 1}, {"seed": 2**64},
        {"seed": "7"}, {"logprobs": -1}, {"logprobs": 10**9}, {"logit_bias": [1]},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {10**9: 1.0}}, {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: NAN}}, {"logit_bias": {1: INF}}, {"logit_bias": {1: "x"}},
        {"grammar": 3}, {"dry_multiplier": -1}, {"dry_base": 0.5}, {"dry_allowed_length": 1.5},
        {"dry_penalty_last_n": -2}, {"dry_sequence_breakers": "a"},
        {"dry_sequence_breakers": [""]}, {"dry_sequence_breakers": ["x" * 41]},
        {"dry_sequence_breakers": ["a"] * 17}, {"top_n_sigma": NAN}, {"typical_p": 0},
        {"xtc_probability": 1.1}, {"xtc_threshold": -0.1}, {"dynatemp_range": -1},
        {"dynatemp_exponent": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_out_of_range_is_one_line(vocab: Vocab, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        vocab.sampler(**settings)
    assert str(caught.value).startswith(("a token of logit_bias", next(iter(settings))))
    assert "give a" in str(caught.value) or "give GBNF" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numpy_numbers_are_numbers(vocab: Vocab) -> None:
    settings = {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.uint32(4)}
    settings |= {"typical_p": np.float32(0.5), "top_p": np.float16(0.5), "logprobs": np.uint8(255)}
    bias = {np.int32(3): np.float32(1)}
    with vocab.sampler(**settings, logit_bias=bias, repeat_penalty=np.float32(1.1)) as sampler:
        sampler.sample(vocab.row())


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("settings", [{}, *SETTINGS])
def test_broken_logits_are_the_backend_s_fault(
    vocab: Vocab, bad: float, settings: dict[str, Any]
) -> None:
    row = vocab.noise(10, 1)[0]
    row[123] = bad
    with vocab.sampler(**settings) as sampler, pytest.raises(BackendError, match="not finite"):
        sampler.sample(row)


def test_a_row_of_another_size_is_refused(vocab: Vocab) -> None:
    with vocab.sampler() as sampler:
        for row in (np.zeros(vocab.n - 1, np.float32), np.zeros(vocab.n)):
            with pytest.raises(InputError, match="expected float32"):
                sampler.sample(row)  # type: ignore[arg-type]


def test_closing_twice_is_fine_and_using_after_is_not(vocab: Vocab) -> None:
    sampler = vocab.sampler(temperature=0.8, grammar='root ::= "a"')
    sampler.close()
    sampler.close()
    for use in (
        lambda: sampler.sample(vocab.row()),
        lambda: sampler.logprobs(vocab.row(), 0),
        lambda: sampler.accept_prompt([1]),
    ):
        with pytest.raises(ClosedError):
            use()


@pytest.fixture(scope="module")
def given_rows(vocab: Vocab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GivenRows]:
    with contextlib.closing(GivenRows(tmp_path_factory.mktemp("given"), vocab.n)) as rows:
        yield rows


def test_a_sampler_of_another_vocabulary_draws_nothing(vocab: Vocab, given_rows: GivenRows) -> None:
    given_rows.decode([vocab.row()])
    with (
        Sampler(SamplingParams(temperature=0.8), vocab.n + 1, n_ctx=64) as sampler,
        pytest.raises(ValueError, match=f"{vocab.n + 1} tokens; the target has {vocab.n}"),
    ):
        sampler.draw(given_rows.target, 0)


@pytest.fixture
def fetched(given_rows: GivenRows, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The output rows that are fetched whole."""
    rows: list[int] = []
    fetch = given_rows.target.output_logits

    def counted(output_row: int) -> Logits:
        rows.append(output_row)
        return fetch(output_row)

    monkeypatch.setattr(given_rows.target, "output_logits", counted)
    return rows


BOUND: list[dict[str, Any]] = [
    {"grammar": 'root ::= [a-z ]+ ("." [0-9]*)?'},
    {"lark": 'start: /[a-z ]+/ ("." /[0-9]*/)?'},
]


@pytest.mark.parametrize("bound", BOUND, ids=lambda bound: next(iter(bound)))
@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_k": 200, "top_p": 1.0, "min_p": 0.0}])
def test_a_grammar_wants_the_whole_row_only_where_it_forbids_the_draw(
    vocab: Vocab,
    given_rows: GivenRows,
    fetched: list[int],
    params: dict[str, Any],
    bound: dict[str, Any],
) -> None:
    """Some of these rows favour what it allows, so that both happen; the states stay alike."""
    params = {"temperature": 1.0, "seed": 11, **params, **bound}
    rng = np.random.default_rng(5)
    letters = [vocab.ids[bytes([c])] for c in b"abcdefgh "]
    rows = [rng.normal(0, 2.0, vocab.n).astype(np.float32) for _ in range(60)]
    for i, row in enumerate(rows):
        row[letters] += np.float32((i % 3) * 5)
    given_rows.decode(rows)
    with vocab.sampler(**params) as whole, vocab.sampler(**params) as few:
        for i, row in enumerate(rows):
            assert few.draw(given_rows.target, i) == whole.sample(row)
    assert 0 < len(fetched) < len(rows)
    assert len(set(fetched)) == len(fetched)


def test_a_draw_among_equal_logits_needs_the_whole_row(vocab: Vocab, given_rows: GivenRows) -> None:
    row, native = vocab.row(), given_rows.target.native
    row[[3, 4, 5]] = 9, 8, 8
    given_rows.decode([row])
    settings = {"temperature": 1.0, "top_k": 2, "seed": 1}
    first = native.n_whole_rows
    with vocab.sampler(**settings) as whole, vocab.sampler(**settings) as few:
        assert few.n_candidates == 3  # one more than are kept
        for _ in range(40):
            before = native.n_whole_rows
            drawn = few.draw(given_rows.target, 0)
            assert drawn == whole.sample(row)
            assert native.n_whole_rows - before == (drawn != 3)
    assert 0 < native.n_whole_rows - first < 40


def test_a_sampler_is_not_made_without_its_grammar(vocab: Vocab) -> None:
    with pytest.raises(InputError, match="constraint"):
        Sampler(SamplingParams(grammar='root ::= "a"'), vocab.n, n_ctx=64)
