"""The lead of a token, measured where answers part."""

from dataclasses import replace

import pytest

from dflash_local import Model
from dflash_local.bench.measure.rounding import lead_after

PROMPT = "def add(a, b):\n"


def test_the_lead_and_the_noise_of_a_token(auto_model: Model) -> None:
    model = auto_model
    model.forget()
    prompt = model.tokenize(PROMPT)
    plain = model.generate(prompt, temperature=0.0, max_tokens=8, draft_width=0, logprobs=2)
    model.forget()
    lead = lead_after(model.target, prompt, plain.tokens[:7], [2, 4])
    (_, first), (_, second) = plain.logprobs[7].top[:2]
    assert lead.gap == pytest.approx(first - second, abs=1e-4)
    assert lead.noise == 0.0  # Q8_0 on the CPU with a q8_0 cache is exact to the bit
    assert not lead.is_within_rounding
    assert replace(lead, noise=lead.gap).is_within_rounding
    model.forget()
    forked = lead_after(model.target, prompt, plain.tokens[:7], [4, 8, 64], forked=True)
    assert forked.gap == lead.gap
    # The same tokens in other cells: as far apart as 8-bit activations take the last bit.
    assert 0 <= forked.noise < 0.2
    assert model.generate("a", max_tokens=1).stats.cached_tokens == 0


def test_noise_is_looked_for_in_passes_of_so_many_rows(auto_model: Model) -> None:
    """Kernels are chosen by them, so a pass that is cut to a short answer shows another noise."""
    model = auto_model
    model.forget()
    target, prompt = model.target, model.tokenize(PROMPT)
    answer = model.generate(prompt, temperature=0.0, max_tokens=5, draft_width=0).tokens
    model.forget()
    before = target.n_decoded
    lead_after(target, prompt, answer, [2, 64])
    assert target.n_decoded - before == len(prompt) + 5 + 6 + 64
