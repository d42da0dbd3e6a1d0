"""The README's example as type checkers see it, where the package is installed for development."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKERS = {
    "mypy": ("mypy", "--strict", "--python-executable", sys.executable),
    "pyright": ("basedpyright", "--level", "error", "--pythonpath", sys.executable),
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_readme_s_example_has_its_types(checker: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = (block for block in blocks if "dflash_local.load(" in block)
    asked = "\n    reveal_type(model.generate('').stats.tokens_per_round)\n"
    (tmp_path / "example.py").write_text(example + asked)
    done = subprocess.run(
        [sys.executable, "-m", *CHECKERS[checker], "example.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPY_CACHE_DIR": str(ROOT / "build" / "clients" / "mypy")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert checker == "pyright" or "float" in done.stdout, done.stdout
