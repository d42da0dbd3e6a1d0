"""`dflash-local show`: what is known of a model, and which of its quantisations fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_local.errors import InputError
from dflash_local.fit.options import LoadOptions

from .answer import write_json, write_report
from .list import gigabytes
from .options import JSON, SectionedCommand
from .report import table

if TYPE_CHECKING:
    from dflash_local.pairs.address import Address
    from dflash_local.pairs.find import Files

_CONTEXT = 8192
INCOMPLETE = 1
_ROWS = (  # as an entry of the registry has them
    "name", "aliases", "target", "architecture", "gguf", "with_heads", "package", "drafter",
    "family", "thinking", "sampling", "thinking_sampling", "no_thinking_sampling", "answer_length",
    "training_length", "notes",
)  # fmt: skip
_NAMES = {
    "with_heads": "GGUF with heads",
    "thinking": "thinks by default",
    "thinking_sampling": "sampling if it thinks",
    "no_thinking_sampling": "sampling if not",
}
_UNKNOWN = {
    "sampling": "not known, so chats take llama.cpp's",
    "thinking": "as its chat template does",
    "training_length": "not known: drafts look back at the whole context",
}


@click.command(cls=SectionedCommand, sections={"Output": (JSON,)})
@click.argument("model")
def show(model: str, as_json: bool) -> int:
    """Show what is known of MODEL, and which quantisation fits.

    That is its target, its drafter, and the defaults of requests to it. The hub is asked for sizes;
    of the model's file a few megabytes are read, to plan the memory. Without a network it shows
    what is on this disk; the exit code is 1 where that leaves sizes and memory unknown.
    """
    from dflash_local.pairs import registry
    from dflash_local.pairs.address import HubAddress, NamedPair, read_address
    from dflash_local.pairs.find import find_target
    from dflash_local.pairs.inventory import stock_of
    from dflash_local.pairs.stores import stored

    address = read_address(model)
    entry = address.entry if isinstance(address, NamedPair) else None
    if isinstance(address, HubAddress):
        entry = registry.of_target(address.repo)
    told: dict[str, Any] = {"name": model}
    if entry:
        told = {name: getattr(entry, name) for name in _ROWS}
        told["drafter_here"] = stock_of(entry).drafter_here
    try:
        files = find_target(address, newest=True)
    except InputError as error:
        try:  # no network, or nothing to ask for
            files = find_target(address)
        except InputError:
            if entry is None:
                raise
            told["unknown"] = str(error)
            files = None
    if files is not None:
        name = model if stored(model) else Path(files.key).name
        told |= _model(files, name, _drafter_bytes(address, files))
    if as_json:
        write_json(told)
    else:
        write_report(_text(told))
    return INCOMPLETE if "unknown" in told else 0


def _drafter_bytes(address: Address, files: Files) -> int:
    """The bytes of the drafter that would be loaded with a model; 0 where none is known."""
    from dflash_local.pairs.find import drafter_bytes, find_drafter

    try:
        return drafter_bytes(find_drafter(None, address, files))
    except InputError:
        return 0


def _model(files: Files, name: str, drafter: int) -> dict[str, Any]:
    """The memory that a model takes beside a drafter of so many bytes, and its quantisations: their
    bytes, whether they are here and fit, and how many bytes of experts would lie in RAM. A file
    alone goes by `name`."""
    from dflash_local.fit.architectures import EMBEDDING_ARCHITECTURES
    from dflash_local.fit.pairing import check_model
    from dflash_local.gguf.file import GgufFile
    from dflash_local.llama import runtime
    from dflash_local.pairs.defaults import defaults_of
    from dflash_local.pairs.memory import planned_bytes, which_fit

    devices = runtime.devices()
    sizes = files.sizes()
    model = files.remote() if files.missing() else GgufFile.open(files.path())
    check_model(model, takes=EMBEDDING_ARCHITECTURES)
    context = min(_CONTEXT, model.require(f"{model.architecture}.context_length", int))
    options = LoadOptions(n_ctx=context)
    sizes = sizes or {name: model.n_bytes}
    fitting = which_fit(model, drafter, options, devices, sizes)
    memory = planned_bytes(model, options, devices)
    return {
        "chats": dict(defaults_of(model, None).for_chats),
        "context": context,
        "memory": memory and memory + drafter,
        "drafter_bytes": drafter or None,
        "takes": files.quant() or name,
        "quantisations": [
            {
                "name": name,
                "n_bytes": size,
                "here": not files.of(name).missing(),
                "fits": name in fitting,
                "experts_in_ram": fitting[name].experts_bytes if name in fitting else 0,
            }
            for name, size in sorted(sizes.items(), key=lambda item: item[1])
        ],
    }


def _text(told: Mapping[str, Any]) -> str:
    known = [name for name in _ROWS if name in told]
    values = ((name, _value(told[name]) or _UNKNOWN.get(name)) for name in known)
    rows = [(_NAMES.get(name, name.replace("_", " ")), value) for name, value in values if value]
    lines = [table(rows)]
    if "unknown" in told:
        lines += ["", told["unknown"]]
    if "quantisations" in told:
        memory = told["memory"]
        need = f"{gigabytes(memory)} of memory" if memory else "more memory than there is"
        drafter = told["drafter_bytes"]
        beside = f" with its drafter of {gigabytes(drafter)}" if drafter else ""
        context = f"a context of {told['context']} tokens"
        lines += ["", f"{told['takes']}{beside} takes {need} at {context}"]
        lines += [f"chats that do not say are sampled with {_value(told['chats'])}"]
        files = [
            (each["name"], gigabytes(each["n_bytes"]), "here" if each["here"] else "", _fits(each))
            for each in told["quantisations"]
        ]
        lines += ["", table(files)]
    return "\n".join(lines) + "\n"


def _fits(quantisation: Mapping[str, Any]) -> str:
    if experts := quantisation["experts_in_ram"]:
        return f"fits with experts in RAM, {gigabytes(experts)}"
    return "fits" if quantisation["fits"] else "does not fit"


def _value(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return ", ".join(f"{name} {each:g}" for name, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
