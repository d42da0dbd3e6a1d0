"""The package's requirements keep out versions that are known to be unsafe, and the lock file fits
them."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[1] / "requirements.lock"

UNSAFE = {
    "fastapi": "0.120.0",  # takes a starlette that is
    "h11": "0.15.0",  # CVE-2025-43859: a second request hidden in a malformed chunk
    "jinja2": "3.1.5",  # CVE-2025-27516: a template leaves the sandbox
    "numpy": "1.21.6",  # CVE-2021-41495
    "pydantic": "2.7.4",  # no fail_fast: an error for each item of a list
    "pyyaml": "5.3.1",  # CVE-2020-14343
    "starlette": "0.49.0",  # CVE-2025-62727: a Range header takes quadratic time
}


@pytest.mark.parametrize(("name", "version"), UNSAFE.items())
def test_an_unsafe_version_is_not_accepted(name: str, version: str) -> None:
    asked = [Requirement(line) for line in requires("dflash-local") or ()]
    mine = [one for one in asked if one.name.lower() == name and one.marker is None]
    assert mine and all(version not in one.specifier for one in mine)


PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SYSTEMS = ("linux", "darwin", "win32")


def locked() -> Iterator[Requirement]:
    text = re.sub(r"\\\n", " ", LOCK.read_text(encoding="utf-8"))
    for line in text.splitlines():
        if line and not line.lstrip().startswith("#"):
            pin, *hashes = re.split(r"\s+--hash=sha256:", line.rstrip())
            assert hashes and all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes), line
            yield Requirement(pin)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_lock_has_one_fitting_version_of_each_dependency(python: str, system: str) -> None:
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": system,
        "extra": "",
    }
    pins = [pin for pin in locked() if pin.marker is None or pin.marker.evaluate(environment)]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert len(versions) == len(pins)
    for line in requires("dflash-local") or ():
        asked = Requirement(line)
        if asked.marker is None or asked.marker.evaluate(environment):
            version = versions[canonicalize_name(asked.name)]
            assert asked.specifier.contains(version.removeprefix("==")), f"{asked}: {version}"


def test_the_lock_is_complete_for_this_machine() -> None:
    pins = list(locked())
    names = {canonicalize_name(pin.name) for pin in pins}
    for pin in pins:
        name = canonicalize_name(pin.name)
        try:
            is_here = pin.specifier.contains(version(name))
        except PackageNotFoundError:  # of another system, or of another Python
            continue
        for line in (requires(name) or ()) if is_here else ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert canonicalize_name(need.name) in names, f"{name} needs {need}"


def test_the_lock_brings_no_training_and_names_no_server() -> None:
    names = {canonicalize_name(pin.name) for pin in locked()}
    assert not [name for name in names if re.match("torch|nvidia|cuda|triton", name)]
    assert "://" not in LOCK.read_text(encoding="utf-8")
