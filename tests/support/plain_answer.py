"""A prompt and its plain answer: the measure of every drafted answer."""

from collections.abc import Callable, Sequence
from typing import Any

from adversarial import Script, ScriptedDrafter
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence as Answer
from dflash_local.stats import Stats
from dflash_local.target_model.target import Target
from gap_rule import equal_by_gap_rule
from pair_engine import Width, answer, request

Plain = Callable[..., list[int]]
"""`plain_tokens` of one target."""


def plain_tokens(
    target: Target, prompt: str | Sequence[int], max_tokens: int = 48, **params: Any
) -> list[int]:
    """The tokens of a `PlainAnswer`. Steps are made ahead, as without log-probabilities."""
    return PlainAnswer(target, prompt, max_tokens, **{"logprobs": None, **params}).tokens


class PlainAnswer:
    """Decoded without drafts from empty caches, which it leaves behind. `text` is the prompt with
    the answer."""

    def __init__(
        self,
        target: Target,
        prompt: str | Sequence[int],
        max_tokens: int | None = 48,
        *,
        logprobs: int | None = 2,
        **params: Any,
    ) -> None:
        """`params` are the samplers', for this answer and for those of `ask`."""
        self.target, self.max_tokens, self.params = target, max_tokens, params
        tokenize = target.vocabulary.tokenize
        self.prompt = tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        bare = Engine(target, None, target.options.n_seq)
        bare.slots.forget_all()
        found = answer(bare, self.prompt, 0, max_tokens, logprobs=logprobs, **params)
        bare.slots.forget_all()
        self.tokens, self.logprobs = found.tokens, found.logprobs
        self.finish_reason = found.finish_reason
        self.text = self.prompt + self.tokens

    def ask(self, engine: Engine, width: Width = 16, **options: Any) -> Answer:
        """The same request with drafts; options are those of `pair_engine.request`."""
        return answer(engine, self.prompt, width, self.max_tokens, **self.params, **options)

    def asked(self, engine: Engine, width: Width = 16, **options: Any) -> Answer:
        """As `ask`. Fails unless the answer is the same."""
        found = self.ask(engine, width, **options)
        assert found.tokens == self.tokens
        assert found.finish_reason == self.finish_reason
        return found

    def scripted(self, script: Script, width: Width = 16, **options: Any) -> Stats:
        """As `asked`, drafted by a script, from empty caches, which it leaves behind."""
        n_seq = self.target.options.n_seq
        engine = Engine(self.target, ScriptedDrafter(script, n_seq=n_seq), n_seq)
        engine.slots.forget_all()
        try:
            return self.asked(engine, width, **options).stats
        finally:
            engine.slots.forget_all()

    def equals(self, tokens: Sequence[int], noise: float | Callable[[], float]) -> bool:
        """Whether `tokens` are those of this answer, as far as they go. Fails where rounding that
        moves a logit by `noise` does not explain that they differ."""
        n = len(tokens)
        return equal_by_gap_rule(self.tokens[:n], self.logprobs, list(tokens), noise)


def asked_at_once(
    engine: Engine, known: Sequence[PlainAnswer], widths: Sequence[Width], **options: Any
) -> list[Answer]:
    """Several at once, each drafted at a width of its own. Fails unless all are the plain ones."""
    answers = [
        engine.begin(request(each.prompt, width, each.max_tokens, **each.params, **options))
        for each, width in zip(known, widths, strict=True)
    ]
    engine.run(answers)
    assert [found.tokens for found in answers] == [each.tokens for each in known]
    assert not any(found.error or found.stats.warning for found in answers)
    return answers
