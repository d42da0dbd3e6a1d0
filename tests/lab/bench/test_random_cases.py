"""Random prompts and answers."""

from dflash_local import Model
from lab.bench.random_cases import random_cases, with_random_answers


def test_random_answers_have_their_length_and_no_end(model: Model) -> None:
    cases = random_cases(model.target.n_vocab, {"random": 8}, limit=2)
    answers = [case.answer for case in with_random_answers(model.target, cases, 96)]
    assert all(answer and len(answer) == 96 for answer in answers)
    assert answers[0] != answers[1]
    ends_text = model.target.vocabulary.ends_text
    assert not any(ends_text(token) for answer in answers for token in answer or ())
