"""Fixtures of all tests: the tiny pair, loaded once."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import mini_pair
import tiny_coder
from dflash_local import Model
from guarded_server import guarded
from server_process import client, server
from shapes import chain_model, either_model, f32_target, shape, tree_model
from tool_server import tool_client, tool_server

__all__ = [
    "chain_model",
    "client",
    "either_model",
    "f32_target",
    "guarded",
    "server",
    "shape",
    "tool_client",
    "tool_server",
    "tree_model",
]  # fixtures that have a file of their own

# What is started in the background of a shell inherits that Ctrl-C is ignored, and so would every
# process that the tests interrupt. A handler of our own is reset to the default in them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What commands show is as wide as where there is no terminal, whatever the tests' own is like. Some
# ask for it as they are imported.
os.environ["COLUMNS"] = "80"
os.environ.pop("NO_COLOR", None)
os.environ.pop("FORCE_COLOR", None)

# No test is to fail because the machine is busy. Every run tries other examples.
settings.register_profile("any machine", deadline=None, max_examples=50)
settings.load_profile("any machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Twice the cores: about half of their time tests wait, for commands, servers and timeouts."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return 2 * (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `one_in(n)`, one case of each n stays in the daily run. The others are slow
    tests, which CI runs as well. Those for a GPU are in neither, and those for the hub or
    another program run only if `-m` names them."""
    for name in ("hub", "peer"):
        if name not in config.option.markexpr:
            items[:] = [item for item in items if not item.get_closest_marker(name)]
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.slow)
        mark = item.get_closest_marker("one_in")
        if mark:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


# What is collected stays to the end: half of a collection's time went into looking for garbage in
# it, again and again.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of our own, so that no verdict of another run hides a fault."""
    folder = tmp_path_factory.mktemp("cache")
    if "PYTEST_XDIST_WORKER" in os.environ and os.name == "posix":
        # Each file is tried in a child process, which takes a second: by one of the workers.
        shared = tmp_path_factory.getbasetemp().parent / "probe"
        shared.mkdir(exist_ok=True)
        (folder / "probe").symlink_to(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_LOCAL_CACHE", str(folder))
        patch.setattr(mini_pair, "FOLDER", tmp_path_factory.mktemp("mini-pair"))
        # A pair of ours where none is named: one that answers in milliseconds.
        patch.setenv("DFLASH_LOCAL_REGISTRY", str(tiny_coder.FOLDER / "registry.toml"))
        patch.setenv("DFLASH_LOCAL_TARGET", "tiny-coder-q8_0")
        # Nor settings, what was typed, or tuned drafters.
        for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
            patch.setenv(name, str(folder / name))
        # The commands' --threads: those that wait for each other by spinning make tests that share
        # the machine's cores many times slower.
        patch.setenv("DFLASH_LOCAL_THREADS", "1")
        # What drafting costs decides no answer, so it need not be measured well.
        patch.setenv("DFLASH_LOCAL_CALIBRATION_S", "0.05")
        yield folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for one test."""
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """Target and drafter of the tests' pair."""
    return tiny_coder.pair()


@pytest.fixture(scope="session")
def model(chain_model: Model) -> Model:
    """The tests' pair where its verification is exact to the bit: Q8_0 and q8_0 KV, on the CPU."""
    return chain_model


@pytest.fixture(autouse=True)
def with_empty_caches(request: pytest.FixtureRequest) -> None:
    """Each test finds the model's caches empty: texts left there by tests before it, other ones in
    each worker, would move the last bits of a prompt's states, and with them a draw."""
    for name in {"chain_model", "either_model"}.intersection(request.fixturenames):
        request.getfixturevalue(name).forget()
