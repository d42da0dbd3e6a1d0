"""From a published drafter to a GGUF file that has been seen to load."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, Keys
from numpy.typing import NDArray

from dflash_local.errors import InputError
from dflash_local.fit.pairing import check_target
from dflash_local.gguf.drafter_spec import Family
from dflash_local.gguf.drafter_tensors import D2T
from dflash_local.gguf.file import GgufFile
from dflash_local.version import version

from .checks import CheckResult, check_fit, check_written, planned_file
from .config.drafter_config import ARCHITECTURE, DraftConfig, read_config
from .config.families import identify
from .config.target_link import TargetFacts
from .files.checkpoint import Checkpoint
from .files.reading import read_json
from .files.source import CONFIG, Source, fetch_drafter
from .key import Key
from .quantization import file_type, tensor_type
from .tensors.masked_embedding import masked_tensors
from .tensors.names import absolute_ids, left_out, plan_tensors
from .tensors.plan import RowSource, TensorPlan, planned_rows
from .tokenizer import check_own_tokenizer, tokenizer_keys
from .writer import check_place, write_gguf

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
StrPath = str | os.PathLike[str]
Find = Callable[[Source, dict[str, Any]], GgufFile]
"""Finds the target of a drafter with this config."""

_CONFIG_LIMIT = 1 << 24  # bytes
# llama.cpp ignores keys that it does not know
SOURCE = "dflash_local.source"
REVISION = "dflash_local.source.revision"
SHA256 = "dflash_local.source.sha256"
TARGET = "dflash_local.target"
VERSION = "dflash_local.version"


@dataclass(frozen=True)
class ConvertResult:
    """The file that was written; after a dry run, the one that would be."""

    path: Path
    source: str
    """Hub id, or the folder's name."""
    revision: str | None
    """The commit, if the drafter comes from the hub."""
    sha256: str | None
    """Of the weights; None after a dry run."""
    target: str
    family: Family
    outtype: str
    n_bytes: int
    """Bytes of the file; after a dry run, of its tensors."""
    n_tensors: int
    block_size: int
    target_layers: tuple[int, ...]
    """Tap k is the input of this layer of the target."""
    left_out: dict[str, str]
    """Tensors of the checkpoint that the file does not hold, and why."""
    checks: list[str]
    """The points that were checked and are right, in words."""
    notes: list[str] = field(default_factory=list)
    """The points that could not be checked, or may surprise, in words."""

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values | {"path": str(self.path), "target_layers": list(self.target_layers)}


@dataclass(frozen=True)
class _Conversion:
    """A conversion that is planned and checked, before any weights are read."""

    path: Path
    drafter: Source
    target: GgufFile
    config: DraftConfig
    weights: Checkpoint
    tensors: list[tuple[TensorPlan, GGMLQuantizationType]]
    origins: dict[str, RowSource]
    """Sources of the rows of tensors that are not in the checkpoint, by GGUF name."""
    left_out: dict[str, str]
    tokenizer: list[Key]

    def rows(self, plan: TensorPlan, start: int, stop: int) -> NDArray[np.float32]:
        if plan.name == D2T:
            ids = absolute_ids(self.weights.integers(plan.source), self.config.spec.n_vocab)
            return ids.astype(np.float32)[np.newaxis][start:stop]
        return planned_rows(self.origins.get(plan.name, self.weights), plan, start, stop)


def convert(
    source: StrPath,
    *,
    target: StrPath | Find,
    outtype: str = "q8_0",
    output: StrPath | None = None,
    revision: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    say: Say | None = None,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write the drafter `source`, a hub id or a local folder, as a GGUF file.

    `target`: the GGUF file of the model that it drafts for, or a function that finds it: of a file
    that is not on this disk the header does. `outtype`: one of `quantization.OUTTYPES`. `output`:
    by default `<drafter>-<outtype>.gguf` in the working folder; an existing file is only replaced
    with `force`. `revision`: branch, tag or commit of a drafter
    on the hub. With `dry_run`, everything is fetched and planned, and nothing is written. `say` is
    called with a line for each decision, `progress` with the bytes of tensors written so far and in
    all.

    The file is checked before it gets its name (see `ConvertResult.checks`), and appears whole or
    not at all. The same input gives the same bytes. Raises InputError (FileError is one) for a
    checkpoint that cannot be fetched, is no drafter, does not fit the target, or cannot be written.
    """
    say = say or (lambda line: None)
    number = file_type(outtype)  # before anything is fetched
    if output is not None:
        check_place(Path(output), force)
    drafter = fetch_drafter(
        source, revision=revision, accept=lambda config: identify(_read_config(config.parent))
    )
    plan = _planned(drafter, target, outtype, output, say)
    check_place(plan.path, force)
    if plan.path.exists() and any(plan.path.samefile(shard) for shard in plan.target.shards):
        raise InputError(f"{plan.path}: is the target; choose another name for the drafter")
    for name, why in plan.left_out.items():
        say(f"left out: {name} ({why})")
    sha256 = "" if dry_run else plan.weights.sha256()
    keys = _keys(plan, number, sha256)
    planned = planned_file(plan.path, keys, plan.tensors)
    found = CheckResult()
    # d2t is checked by its values, which are only there once the file is written
    if D2T not in planned.tensors:
        found = check_fit(plan.target, planned)
    n_bytes = planned.n_bytes
    if not dry_run:

        def check(part: Path) -> None:
            nonlocal found
            found = check_written(part, planned, plan.target)

        write_gguf(
            plan.path, keys, plan.tensors, plan.rows, force=force, progress=progress, check=check
        )
        n_bytes = plan.path.stat().st_size
    found.notes.extend(plan.config.notes)
    for note in found.notes:
        say(note)
    return ConvertResult(
        path=plan.path,
        source=drafter.name,
        revision=drafter.revision,
        sha256=sha256 or None,
        target=str(plan.target.path),
        family=plan.config.spec.family,
        outtype=outtype,
        n_bytes=n_bytes,
        n_tensors=len(plan.tensors),
        block_size=plan.config.spec.block_size,
        target_layers=plan.config.spec.target_layers,
        left_out=plan.left_out,
        checks=found.checks,
        notes=found.notes,
    )


def tensor_plans(folder: Path, target: Path) -> list[TensorPlan]:
    """The tensors that `convert` makes of the checkpoint in `folder`, for a target's GGUF file, and
    which tensors of the checkpoint they come from. Raises InputError."""
    return [
        plan
        for plan, _ in _planned(fetch_drafter(folder), target, "bf16", None, lambda _: None).tensors
    ]


def _planned(
    drafter: Source, target: StrPath | Find, outtype: str, output: StrPath | None, say: Say
) -> _Conversion:
    raw = _read_config(drafter.folder)
    identify(raw)
    found = target(drafter, raw) if callable(target) else GgufFile.open(target)
    check_target(found)
    config = read_config(raw, target=TargetFacts.of(found))
    spec = config.spec
    weights = Checkpoint.open(drafter.folder)
    plans = plan_tensors(config, weights.tensors)
    skipped = left_out(config, weights.tensors)
    masked = masked_tensors(drafter.folder, config, weights, found)
    for tensor, _ in masked.values():
        say(f"{tensor.name}: for mask_embedding.pt, from {tensor.source}")
        skipped.pop(tensor.source, None)
    plans = [tensor for tensor in plans if tensor.name not in masked]
    plans += [tensor for tensor, _ in masked.values()]
    tokenizer = tokenizer_keys(found, n_vocab=spec.n_vocab, mask_token_id=spec.mask_token_id)
    check_own_tokenizer(drafter.folder, found)
    name = f"{_model_name(drafter).lower()}-{outtype}.gguf"
    return _Conversion(
        path=Path(name) if output is None else Path(output),
        drafter=drafter,
        target=found,
        config=config,
        weights=weights,
        tensors=[(each, tensor_type(each, outtype, n_layer=spec.n_layer)) for each in plans],
        origins={name: origin for name, (_, origin) in masked.items()},
        left_out=skipped,
        tokenizer=tokenizer,
    )


def _keys(plan: _Conversion, number: int, sha256: str) -> list[Key]:
    general = Keys.General
    return [
        Key.of(general.ARCHITECTURE, ARCHITECTURE),
        Key.of(general.TYPE, "model"),
        Key.of(general.NAME, _model_name(plan.drafter)),
        *_provenance(plan.drafter, plan.target, sha256),
        *plan.config.keys_for([tensor.name for tensor, _ in plan.tensors]),
        *plan.tokenizer,
        Key.of(general.QUANTIZATION_VERSION, GGML_QUANT_VERSION),
        Key.of(general.FILE_TYPE, number),
    ]


def _model_name(source: Source) -> str:
    """The name without its owner."""
    return source.name.rpartition("/")[2]


def _provenance(drafter: Source, target: GgufFile, sha256: str) -> list[Key]:
    """The drafter's origin, its target, the `sha256` of its weights, our own version.

    Of a local folder only the name is kept, of the target the name inside its file.
    """
    general, license_name = Keys.General, drafter.card.get("license")
    found: dict[str, str | int | None] = {
        SOURCE: drafter.name,
        REVISION: drafter.revision,
        SHA256: sha256,
        VERSION: version(),
        general.LICENSE: license_name if isinstance(license_name, str) else None,
    }
    if drafter.revision is not None:
        found[general.SOURCE_REPO_URL] = f"https://huggingface.co/{drafter.name}"
    if isinstance(name := target.get(general.NAME), str) and name:
        found |= {
            TARGET: name,
            general.BASE_MODEL_COUNT: 1,
            general.BASE_MODEL_NAME.format(id=0): name,
        }
    return [Key.of(name, value) for name, value in found.items() if value is not None]


def _read_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG, _CONFIG_LIMIT)
