"""`/slots`: the state of a model's slots, and their content as files; llama-server's form.

Nothing of a prompt is told.
"""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel

from dflash_local.model import Model
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import on_model, pool_of
from dflash_local.server.http.errors import ApiError, bad_request, check_switch
from dflash_local.server.http.security import client

router = APIRouter()


@router.get("/slots")
async def slots(request: Request, model: str | None = None) -> list[dict[str, Any]]:
    """For each slot of a model whether it is busy, and the number of tokens in its caches; nothing
    where the model is not loaded."""
    check_switch(request.app.state.settings.slots, "--no-slots")
    loaded = pool_of(request).find(model).writer
    if loaded is None:
        return []
    status = loaded.status()
    return [
        {
            "id": slot.id,
            "n_ctx": loaded.n_ctx,
            "speculative": loaded.drafter is not None,
            "is_processing": slot.busy,
            "n_cached_tokens": slot.n_cached_tokens,
        }
        for slot in status.slots
    ]


class SlotFile(BaseModel):
    """`filename`: of a file in the folder of `--slot-save-path`."""

    filename: bounds.Name | None = None


@router.post("/slots/{id_slot}")
async def change_slot(
    request: Request,
    id_slot: Annotated[int, Path(ge=0, le=bounds.MAX_INT)],
    action: Literal["save", "restore", "erase"],
    body: SlotFile | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Save a slot's content in a file, restore it from one, or erase it, once no request is
    running. Needs `--slot-save-path`. Of other API keys neither texts nor files are reached."""
    source = pool_of(request).find(model).source
    if source.options.get("slot_save_path") is None:
        message = "slots are not saved here; start the server with --slot-save-path DIR"
        raise ApiError(501, message, type="not_supported_error")
    name = body.filename if body else None
    if name is None and action != "erase":
        raise bad_request(f"{action} needs the name of a file", param="filename")

    owner = client.get()  # the model's thread does not have it

    def change(loaded: Model, name: str) -> dict[str, Any]:
        begun_at = time.perf_counter()
        if action == "erase":
            return {"id_slot": id_slot, "n_erased": loaded.erase_slot(id_slot, owner=owner)}
        work = loaded.save_slot if action == "save" else loaded.restore_slot
        n, n_bytes = work(id_slot, name, owner=owner)
        counts = (
            {"n_saved": n, "n_written": n_bytes}
            if action == "save"
            else {"n_restored": n, "n_read": n_bytes}
        )
        ms = 1000 * (time.perf_counter() - begun_at)
        return {"id_slot": id_slot, "filename": name, **counts, "timings": {f"{action}_ms": ms}}

    return await on_model(request, model, name or "", change)
