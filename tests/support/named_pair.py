"""The shipped pair on a hub of its own, under the name `tiny`, and commands of a user who has only
that hub."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import shipped_drafter
from convert_command import COMMAND, DRAFTER, TARGET, online, settings
from hub_stand_in import Hub, running

NAME = "tiny"
GGUF = "lab/Tiny-GGUF"
CHECKPOINT = "lab/Tiny-DFlash"
FILE = "tiny-coder-Q8_0.gguf"

REGISTRY = f"""
[{NAME}]
aliases = ["tiny:coder"]
target = "Tiny-30M"
gguf = "{GGUF}"
drafter = "{CHECKPOINT}"
thinking = false
sampling = {{ temperature = 0.0, top_k = 7 }}
answer_length = 6
training_length = 512

[other]
gguf = "lab/Other-GGUF"
drafter = "lab/Other-DFlash"
"""


@dataclass
class User:
    """Someone with an empty cache, whose hub is the stand-in."""

    hub: Hub
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        """The hub client's."""
        return self.home / "hf" / "hub"

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command as a process of its own."""
        return subprocess.run(
            [COMMAND, *arguments],
            cwd=self.home,
            env=self.variables(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """A command that goes on in the background."""
        return subprocess.Popen(
            [COMMAND, *arguments],
            cwd=self.home,
            env=self.variables({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def done(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command that succeeds."""
        done = self.run(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done

    def refused(self, *arguments: str | Path, **environment: str) -> str:
        """The error of a command that fails for what was asked of it."""
        done = self.run(*arguments, **environment)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        line = done.stderr.splitlines()[-1]
        assert line.startswith("dflash-local: error: ") and "Traceback" not in done.stderr
        return line

    def variables(self, more: dict[str, str]) -> dict[str, str]:
        return settings(
            {
                **online(self.hub, self.home / "hf"),
                "DFLASH_LOCAL_CACHE": str(self.home / "own"),
                "DFLASH_LOCAL_REGISTRY": str(self.home / "registry.toml"),
                **self.environment,
                **more,
            }
        )


@contextmanager
def user(home: Path) -> Iterator[User]:
    """A user, and a hub that holds the shipped pair: the target in GGUF, the drafter in
    safetensors."""
    with running() as hub:
        hub.add(GGUF, {FILE: TARGET.read_bytes(), "README.md": b"# Tiny\n"})
        hub.add(CHECKPOINT, dict(checkpoint()))
        (home / "registry.toml").write_text(REGISTRY)
        yield User(hub, home)


@cache
def checkpoint() -> tuple[tuple[str, bytes], ...]:
    """The shipped drafter as its makers would publish it: its files and their bytes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        written = shipped_drafter.write(Path(folder) / "tiny-coder-dflash")
        return tuple((path.name, path.read_bytes()) for path in written.iterdir())


__all__ = ["CHECKPOINT", "DRAFTER", "FILE", "GGUF", "NAME", "TARGET", "User", "checkpoint", "user"]
