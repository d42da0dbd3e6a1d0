"""Server-sent events: their bytes, and what becomes of them when something goes wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.types import Message

from dflash_local.errors import ContextFullError
from dflash_local.server.http import event_stream as module
from dflash_local.server.http.event_stream import (
    LINES,
    AnswerStream,
    Comment,
    NamedEvent,
    ServerEvent,
    event_form,
)

PING = NamedEvent("ping", {"type": "ping"})
SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


class Source:
    """Events, and an error after them if there is to be one; knows whether it was closed."""

    def __init__(self, *events: ServerEvent | Exception, pause: float = 0) -> None:
        self.closed = False
        self._events = events
        self._pause = pause

    async def stream(self) -> AsyncIterator[ServerEvent]:
        try:
            for event in self._events:
                await asyncio.sleep(self._pause)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.closed = True


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


def played(
    source: Source,
    *,
    receive: Callable[[], object] = never,
    path: str = "/",
    sent: list[Message] | None = None,
) -> list[Message]:
    """The messages that a server would be told to send."""
    messages: list[Message] = [] if sent is None else sent

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        messages.append(message)

    async def run() -> None:
        scope = {**SCOPE, "path": path}
        if path.startswith("/api"):
            form = LINES
        elif path == "/v1/messages":
            form = event_form(done=None, keep_alive=PING, name_error=True)
        else:
            form = event_form()
        await AnswerStream(source.stream(), form)(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(run())
    return messages


def body(messages: list[Message]) -> str:
    return b"".join(message["body"] for message in messages[1:]).decode()


def test_comments_where_there_can_be_any() -> None:
    told = [Comment("loading a 40 %"), {"a": 1}]
    assert body(played(Source(*told))) == ': loading a 40 %\n\ndata: {"a":1}\n\ndata: [DONE]\n\n'
    named = body(played(Source(*told), path="/v1/messages"))
    assert named.startswith(": loading a 40 %\n\nevent: ping\n")
    assert body(played(Source(*told), path="/api/chat")) == '{"a":1}\n'


def test_an_error_after_a_comment_is_the_last_event() -> None:
    first, *rest = played(Source(Comment("loading a"), ContextFullError("too long")))
    assert first["status"] == 200
    assert "context_length_exceeded" in rest[-2]["body"].decode()


def test_a_later_error_is_the_last_event() -> None:
    source = Source({"a": "é\n"}, ContextFullError("too long"))
    messages = played(source)
    assert body(messages) == (
        'data: {"a":"é\\n"}\n\n'
        'data: {"error":{"message":"too long","type":"invalid_request_error","param":null,'
        '"code":"context_length_exceeded"}}\n\n'
    )
    assert messages[-1]["more_body"] is False
    assert source.closed


def test_an_error_that_nobody_foresaw_tells_nothing_of_itself() -> None:
    told = body(played(Source({"a": 1}, KeyError("a secret"))))
    assert '"code":"internal_error"' in told and "secret" not in told


def test_what_is_no_json_ends_the_stream() -> None:
    assert '"code":"internal_error"' in body(played(Source({"a": 1}, {"b": float("nan")})))


@pytest.mark.parametrize("pause", [0, 60], ids=["between events", "before the first"])
def test_a_client_that_leaves_closes_the_source(pause: float) -> None:
    source = Source(*({"n": n} for n in range(1000)), pause=pause)
    messages = played(source, receive=gone)
    assert source.closed
    assert len(messages) < 1000


def test_a_long_wait_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    told = body(played(Source({"a": 1}, pause=0.2)))
    head, found, tail = told.partition('data: {"a":1}\n\n')
    assert found and head.startswith(": \n\n") and not head.replace(": \n\n", "")
    assert tail.endswith("data: [DONE]\n\n")


def test_messages_have_pings_and_errors_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    told = body(played(Source(ContextFullError("long"), pause=0.2), path="/v1/messages"))
    ping = 'event: ping\ndata: {"type":"ping"}\n\n'
    assert told.startswith(ping)
    assert told.replace(ping, "") == (
        'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error",'
        '"message":"prompt is too long: long"}}\n\n'
    )


def test_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    path = "/api/chat"
    source = Source({"a": "é\n"}, {"b": 1}, ContextFullError("too long"), pause=0.1)
    first, *rest = messages = played(source, path=path)
    assert dict(first["headers"])[b"content-type"] == b"application/x-ndjson"
    assert body(messages) == '{"a":"é\\n"}\n{"b":1}\n{"error":"too long"}\n'
    assert rest[-1]["more_body"] is False
    assert source.closed
    sent: list[Message] = []
    with pytest.raises(ContextFullError):
        played(Source(ContextFullError("too long"), pause=0.1), path=path, sent=sent)
    assert not sent
