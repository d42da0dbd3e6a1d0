"""Models that a server was not started with: fetched, served, and removed from the disk."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from dflash_local.errors import ClosedError, FileError, InputError
from dflash_local.hub.download import watched
from dflash_local.pairs import inventory
from dflash_local.pairs.address import Address, read_address
from dflash_local.pairs.stores import stored
from dflash_local.server.http.errors import ApiError
from dflash_local.server.models.pool import ModelPool, SourceOf
from dflash_local.server.models.source import ModelSource


@dataclass(frozen=True)
class _Transfer:
    """A model on its way to this disk."""

    name: str
    given_up: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Library:
    """One event loop owns it. One model is fetched at a time."""

    def __init__(self, pool: ModelPool, source_of: SourceOf | None) -> None:
        """`source_of`: None if nothing may be changed."""
        self._pool = pool
        self._source_of = source_of
        self._transfer: _Transfer | None = None

    def as_dict(self) -> dict[str, Any]:
        """The models that have a name, their files here, and their fit, for JSON. It reads the
        disk, and does not ask the hub."""
        devices = self._pool.whole_machine()
        rows = inventory.listed(devices)
        best = inventory.best(rows)
        return {
            "models": [row.as_dict() for row in rows],
            "best": {"name": best[0], "why": best[1]} if best else None,
            "others": inventory.others(devices),
            "may_change": self._source_of is not None,
        }

    async def fetch(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Serve the model of that name, fetched if it is not here. Gives the progress in Ollama's
        words, file by file. Who closes the iterator ends the transfer; the bytes so far are kept.

        Raises ApiError if that is not possible now, InputError for a model that cannot be had.
        """
        source_of = self._checked()
        if name not in self._pool.models:
            name = await run_in_threadpool(_named, name)
        if (last := self._transfer) is not None:
            if not last.given_up.is_set():
                raise ApiError(409, f"{last.name} is being fetched: one model at a time")
            yield {"status": f"waiting for {last.name} to stop"}
            await last.ended.wait()
        if name not in self._pool.models:
            async with aclosing(self._followed(name, source_of)) as events:
                async for event in events:
                    yield event
        yield {"status": "success"}

    async def _followed(
        self, name: str, source_of: SourceOf
    ) -> AsyncGenerator[dict[str, Any], None]:
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        found: Future[ModelSource] = Future()
        transfer = self._transfer = _Transfer(name)
        devices = self._pool.whole_machine()

        def tell(event: dict[str, Any]) -> None:
            if transfer.given_up.is_set():
                raise ClosedError("the transfer was given up")
            loop.call_soon_threadsafe(news.put_nowait, event)

        def watch(file: str, done: int, size: int) -> None:
            tell({"status": f"pulling {file}", "digest": file, "total": size, "completed": done})

        def end() -> None:
            self._transfer = None
            transfer.ended.set()
            news.put_nowait(None)

        def run() -> None:
            try:
                with watched(watch):
                    source = source_of(name, lambda line: tell({"status": line}), devices)
                found.set_result(source)
            except BaseException as error:
                found.set_exception(error)
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(end)

        # The hub may leave it waiting for a minute; a daemon does not hold up the process's end.
        threading.Thread(target=run, name=f"dflash-local pull {name}", daemon=True).start()
        try:
            while (event := await news.get()) is not None:
                yield event
            self._pool.add(found.result())
        finally:
            transfer.given_up.set()

    async def remove(self, name: str) -> int:
        """Remove a model from this disk; the bytes that this frees. Raises ApiError if it is in
        use or not here, InputError for a name that is no model of the list or of the hub."""
        self._checked()
        if (known := name.removesuffix(":latest")) in self._pool.models:
            await self._pool.withdraw(known)
        address = await run_in_threadpool(_address, name)
        for served in list(self._pool.models.values()):
            files = (served.source.target, served.source.draft)
            if any(file and inventory.belongs_to(file, address) for file in files):
                await self._pool.withdraw(served.name)
        freed = await run_in_threadpool(inventory.remove, address)
        if not freed:
            raise ApiError(404, f"nothing of {address} is here", param="model")
        return freed

    def _checked(self) -> SourceOf:
        if self._source_of is None:
            raise ApiError(
                403,
                "this server lets other machines in, so its models are not changed from here: use "
                "`dflash-local pull` and `rm` on its own machine",
                code="not_allowed",
            )
        return self._source_of


def _address(name: str) -> Address:
    """The address that a name means. Raises InputError, also for a path, so that no client can try
    which files there are."""
    with suppress(FileError):
        address = read_address(name.removesuffix(":latest"))
        if not isinstance(address, Path) or stored(name) is not None:
            return address
    raise InputError(f"{name[:100]!r} is no name of a model, and no repository of the hub")


def _named(name: str) -> str:
    """The name under which a model is served."""
    address = _address(name)
    return name if isinstance(address, Path) else str(address)
