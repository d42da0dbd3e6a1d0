"""scikit-build-core's hooks, but an editable install does not put the checkout on `sys.path`.

scikit-build-core's import hook finds every module of an editable install by itself. Its .pth file
also adds the folders that hold the packages. As `convert/` and `cli/` are mapped into
`dflash_local`, these would be the checkout, where `import cli` would then work, and its parent.

Type checkers read no import hooks, but .pth files: a folder of links, which looks as the installed
package does, is for them.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import zipfile
from pathlib import Path

from scikit_build_core import build as _skbuild
from scikit_build_core.build import *  # noqa: F403


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, list[str] | str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the editable wheel, and keep only the import hook in its .pth file, beside the folder
    of links."""
    name = _skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory) / name
    with zipfile.ZipFile(wheel) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}

    replaced: dict[str, bytes] = {}
    for info, data in members.items():
        if "/" not in info.filename and info.filename.endswith(".pth"):
            hooks = [line for line in data.decode().splitlines() if line.startswith("import ")]
            replaced[info.filename] = "".join(f"{line}\n" for line in [*hooks, *_linked()]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in members.items():
            if info.filename.endswith(".dist-info/RECORD"):
                data = _record(data.decode(), replaced).encode()
            archive.writestr(info, replaced.get(info.filename, data))
    return name


def _linked() -> list[str]:
    """The folder with links to the sources of the package; none if there are no links."""
    root = Path.cwd()
    package = root / ".editable" / "dflash_local"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    sources = [*(root / "dflash_local").iterdir(), root / "convert", root / "cli"]
    try:
        for source in sources:
            if source.name != "__pycache__":
                (package / source.name).symlink_to(source)
    except OSError:  # Windows lets administrators only
        return []
    return [str(package.parent)]


def _record(record: str, replaced: dict[str, bytes]) -> str:
    lines = []
    for line in record.splitlines():
        path = line.split(",", 1)[0]
        if path in replaced:
            digest = base64.urlsafe_b64encode(hashlib.sha256(replaced[path]).digest())
            line = f"{path},sha256={digest.decode().rstrip('=')},{len(replaced[path])}"
        lines.append(line)
    return "\n".join(lines) + "\n"
