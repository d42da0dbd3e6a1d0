"""/openapi.json describes every route, and no request, whether it fits or not, makes the server
fail."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dflash_local.server.app import create_app
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.pool import ModelPool
from embedding_models import write_bert
from server_process import EXACT, ServerProcess, serving

ERROR_FIELDS = {"message", "type", "param", "code"}
NUMBERS = {"n_prompt_tokens", "n_ctx"}
LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens", "n_predict"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
    "/completion": ("n_predict",),
    "/infill": ("n_predict",),
}
SHORT = 4  # tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("embedders")
    files = (
        write_bert(folder / "bert.gguf"),
        write_bert(folder / "ranker.gguf", pooling=4, classifier=True),
    )
    both = [word for file in files for word in ("--embedding-model", str(file))]
    # The context is what bounds answers that ask for no end.
    options = ("--parallel", "2", "--ctx", "256", "--slot-save-path", str(folder))
    with serving(*EXACT, *options, *both) as running:
        yield running


def assert_worded(path: str, body: Any) -> None:
    """As the API has it that `path` belongs to."""
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"}
        assert set(body["error"]) == {"type", "message"}
    elif path.startswith("/api/"):
        assert set(body) == {"error"}
        assert isinstance(body["error"], str)
    else:
        too_long = body["error"]["type"] == "exceed_context_size_error"
        assert set(body["error"]) == ERROR_FIELDS | (NUMBERS if too_long else set())


def shortened(path: str, body: Any) -> Any:
    """The request for a few tokens, in which all shows that the server makes of it; but -1, to the
    end of the text, stays."""
    if path in ("/api/chat", "/api/generate"):
        return {**body, "options": {**(body.get("options") or {}), "num_predict": SHORT}}
    names = LENGTHS.get(path, ())
    given = {name: min(body[name], SHORT) for name in names if body.get(name) is not None}
    return {**body, **given} if given or not names else {**body, names[0]: SHORT}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_makes_the_server_fail(mode: str, served: ServerProcess) -> None:
    import schemathesis  # takes seconds
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error

    api = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    for found in api.get_all_operations():
        operation = found.ok()
        if mode == "negative" and not operation.body:
            continue  # nothing to get wrong: any text is a path

        @settings(
            max_examples=15,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def check(case: schemathesis.Case) -> None:
            if mode == "positive" and isinstance(case.body, dict):
                case.body = shortened(case.path, case.body)
            response = case.call(timeout=120)
            case.validate_response(response, checks=[not_a_server_error])
            assert served.process.poll() is None
            if response.status_code >= 400:
                assert_worded(case.path, response.json())

        check()


def test_whoever_reads_the_description_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made at the first request, which takes long."""
    may_go_on = threading.Event()
    app = create_app(ModelPool([]), ServerSettings())
    whole = app.openapi

    def slowly() -> dict[str, Any]:
        assert may_go_on.wait(20), "no other request was answered"
        return whole()

    monkeypatch.setattr(app, "openapi", slowly)

    async def ask() -> tuple[int, int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            described = asyncio.create_task(client.get("/openapi.json"))
            await asyncio.sleep(0)
            health = await client.get("/health")
            may_go_on.set()
            return health.status_code, (await described).status_code

    assert asyncio.run(ask()) == (200, 200)


def test_each_route_takes_the_methods_that_are_described(client: httpx.Client) -> None:
    assert client.head("/openapi.json").status_code == 200
    described = client.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        if "{" not in path:
            head, got = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert (got.status_code == 405) != ("get" in methods)
    assert described["openapi"].startswith("3.")
    assert "http" not in json.dumps(described.get("servers", []))
