"""Names in a request that this server does not know: told in the log once, or refused."""

import difflib
import logging
import re

from pydantic import BaseModel

from dflash_local.server.http.errors import bad_request
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import Use

log = logging.getLogger("dflash_local.server")

_NAME = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,80}")
"""Texts that are logged as a name: no piece of a prompt that was put in a wrong place."""
_MOST = 100
"""Lines that are remembered: a client may send ever new names."""
_FOR_OTHERS = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "modalities", "prediction", "audio", "verbosity", "caption"),
        *("include", "truncation", "background", "text", "conversation", "prompt_cache_options"),
        *("web_search_options", "client_metadata", "context_management", "betas", "mcp_servers"),
        *("container", "output_config", "thinking", "inference_geo", "options"),
        *("samplers", "cache_reuse", "slot_id", "n_indent", "image_data"),
        *("return_tokens", "parse_tool_calls", "thinking_forced_open"),
        *("t_max_prompt_ms", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
)
"""Fields of other servers and for their keeping of accounts, which clients send to any server."""


class RequestCheck:
    """With `strict`, such requests are refused."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._told: set[str] = set()

    def check(self, pool: ModelPool, name: str | None, body: object, use: Use = "chat") -> None:
        """Raises ApiError for a model that is not here, and with `strict` for one that a server of
        one model would answer for, and for unknown fields."""
        served = pool.find(name, use)
        if name and name != served.name and name not in served.source.aliases:
            if self.strict:
                pool.named(name)
            self._tell(name, f"a request names the model {name}; {served.name} answers it")
        for field in sorted(_unknown(body)):
            if self.strict:
                raise bad_request(
                    f"{field[:60]!r} is no field here{_hint(field, body)}", param=field[:60]
                )
            self._tell(field, f"a request has the unknown field {field}{_hint(field, body)}")

    def tell_once(self, line: str) -> None:
        """Log a line, the first time."""
        if line not in self._told:
            self._told.add(line)
            log.warning("warning: %s", line)

    def _tell(self, name: str, line: str) -> None:
        if _NAME.fullmatch(name) and len(self._told) < _MOST:
            self.tell_once(line)


def _unknown(body: object) -> set[str]:
    extra = (body.model_extra if isinstance(body, BaseModel) else None) or {}
    return {name for name, value in extra.items() if value is not None} - _FOR_OTHERS


def _hint(field: str, body: object) -> str:
    near = difflib.get_close_matches(field[:60], type(body).model_fields, 1, 0.8)  # type: ignore[attr-defined]
    return f"; did you mean {near[0]}?" if near else ""
