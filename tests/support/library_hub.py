"""A hub with one small pair that has a name, and the settings of someone with an empty cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hub_stand_in
from convert_command import DRAFTER, TARGET, online
from hub_stand_in import Hub

NAME = "aaa-tiny"
N_BYTES = TARGET.stat().st_size
REGISTRY = f"""
[{NAME}]
target = "Tiny-30M"
size = {N_BYTES}
gguf = "lab/Tiny-GGUF"
drafter = "lab/Tiny-DFlash"

[aaa-huge]
target = "Huge-9000B"
gguf = "lab/Huge-GGUF"
drafter = "lab/Huge-DFlash"
"""
"""The second one is on no hub."""


@contextmanager
def running() -> Iterator[Hub]:
    with hub_stand_in.running() as hub:
        hub.add("lab/Tiny-GGUF", {"tiny-Q8_0.gguf": TARGET.read_bytes()})
        hub.add("lab/Tiny-DFlash", {"dflash-Q8_0.gguf": DRAFTER.read_bytes()})
        yield hub


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Variables of a server whose models lie below `home`."""
    (home / "registry.toml").write_text(REGISTRY)
    return {
        **online(hub, home / "hf"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        "DFLASH_LOCAL_REGISTRY": str(home / "registry.toml"),
        "DFLASH_LOCAL_TARGET": str(TARGET),
        "DFLASH_LOCAL_DRAFT": str(DRAFTER),
        "HOME": str(home),  # of other programs' models
    }
