"""`dflash-local convert`, away from the hub unless a test names one."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import tiny_coder
from command_line import run_here
from hub_stand_in import Hub
from ready_command import ReadyRun

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


def in_process(
    *arguments: str | Path, folder: Path, environment: Environment
) -> subprocess.CompletedProcess[str]:
    """A command as a process of its own, with these variables alone."""
    done = ReadyRun(*arguments, environment=environment, folder=folder).finish()
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def run(
    *arguments: str | Path, folder: Path, environment: Environment | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in `folder`: with an environment in a process of its own, since the hub's client
    reads that only once; else in this one. It must not need the hub then."""
    if environment is not None:
        return in_process("convert", *arguments, folder=folder, environment=settings(environment))
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
