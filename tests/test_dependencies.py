"""What the package asks for keeps out versions that are known to be unsafe."""

from __future__ import annotations

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

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
