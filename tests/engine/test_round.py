"""A round whose steps go further than its answer."""

from __future__ import annotations

from pathlib import Path

from dflash_local import demo, load
from recurrent import write_mamba

N = 24


def test_a_stop_string_among_several_steps_leaves_a_recurrent_target_usable(
    tmp_path: Path,
) -> None:
    """Its state cannot forget the steps after the stop string, so the slot has to know of them."""
    path = write_mamba(tmp_path / "mamba.gguf", demo.pair()[0])
    options = {"n_ctx": 512, "n_seq": 1, "n_threads": 1}
    prompt = "def read"
    with load(path, None, **options) as model:
        whole = model.generate(prompt, max_tokens=N)
        stopped_at = []
        for n in range(1, N - 4):
            before, stop = model.detokenize(whole.tokens[:n]), model.detokenize([whole.tokens[n]])
            if not stop or stop in before or "\ufffd" in stop:
                continue
            model.forget()
            stopped = model.generate(prompt, max_tokens=N, stop=stop)
            assert (stopped.finish_reason, stopped.text) == ("stop", before)
            stopped_at.append(n)
            following = prompt + before + " again"
            second = model.generate(following, max_tokens=N).text
            model.forget()
            assert second == model.generate(following, max_tokens=N).text
        assert stopped_at
