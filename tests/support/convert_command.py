"""`dflash-local convert`, away from the hub unless a test names one."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import tiny_coder
from command_line import COMMAND, run_here
from hub_stand_in import Hub

TARGET, DRAFTER = tiny_coder.pair()

Environment = Mapping[str, str]


def settings(environment: Environment | None = None) -> dict[str, str]:
    """This process's variables without those that say where the hub is, and with others."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING_FACE_")) and "proxy" not in name.lower()
    }
    return {**kept, "HF_HUB_OFFLINE": "1", **(environment or {})}


def run(
    *arguments: str | Path, folder: Path, environment: Environment | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in `folder`: with an environment in a process of its own, since the hub's client
    reads that only once; else in this one, which saves the imports. It must not need the hub then.
    """
    if environment is not None:
        return subprocess.run(
            [COMMAND, "convert", *arguments],
            cwd=folder,
            capture_output=True,
            env=settings(environment),
            encoding="utf-8",
            timeout=300,
        )
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run_here("convert", *map(str, arguments))
    finally:
        os.chdir(before)


def converted(
    *arguments: str | Path, folder: Path, environment: Environment | None = None
) -> subprocess.CompletedProcess[str]:
    done = run(*arguments, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return done


def refused(*arguments: str | Path, folder: Path) -> str:
    """The error's line, of a run that wrote nothing to stdout and left no file in `folder`."""
    before = sorted(folder.iterdir())
    done = run("-q", *arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert sorted(folder.iterdir()) == before
    (line,) = done.stderr.splitlines()
    assert line.startswith("dflash-local: error: ")
    return line


def online(hub: Hub, home: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
