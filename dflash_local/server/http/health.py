"""`/health`: whether requests are taken. It answers without a key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter()


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/v1/health", include_in_schema=False)
async def health(request: Request) -> JSONResponse:
    """`{"status": "ok"}`; while the server drains 503 and "draining"."""
    if request.app.state.drain.draining:
        return JSONResponse({"status": "draining"}, 503, headers={"Retry-After": "5"})
    return JSONResponse({"status": "ok"})
