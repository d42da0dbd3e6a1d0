"""What runs of `tune` and `train` leave behind: files, and a drafter that changes no answer."""

from pathlib import Path

import tiny_coder
from dflash_local.loading import load


def snapshot(folder: Path) -> set[str]:
    """The names of all that is in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def drafts_change_no_answer(target: Path, draft: Path, width: int) -> None:
    answers = []
    for drafter, rows in ((None, 0), (draft, width)):
        with load(
            target, drafter, n_ctx=512, kv_type="q8_0", n_gpu_layers=0, n_threads=1, quiet=True
        ) as model:
            prompt = tiny_coder.prompts()["code"][0]
            answers.append(model.generate(prompt, max_tokens=24, draft_width=rows).tokens)
    assert answers[0] == answers[1]
