"""`/metrics` for Prometheus, in llama.cpp's and vLLM's names where they have one.

Names and meanings: llama.cpp, tools/server/README.md; vLLM, vllm/v1/metrics/loggers.py and
vllm/v1/spec_decode/metrics.py. Counters are totals since the model was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_local.model import Model
from dflash_local.result import Result

if TYPE_CHECKING:
    from dflash_local.status import ModelStatus

router = APIRouter()

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 960)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """The metrics, as text for Prometheus."""
    counted: Metrics = request.app.state.metrics
    return Response(generate_latest(counted.registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    """What one application counts; its registry is its own, so that there may be several."""

    def __init__(self, model: Model, name: str) -> None:
        """`name` is the model's, as answers have it: the label by which vLLM's boards sort."""
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(model, name))
        label = ("model_name",)
        self._responses = Counter(
            "dflash_local:http_responses",
            "Requests by the status of their answer; 0 where the client left before it.",
            ("status",),
            registry=self.registry,
        )
        self._finished = Counter(
            "vllm:request_success",
            "Answers by what ended them.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._waited = Histogram(
            "vllm:request_queue_time_seconds",
            "From a request to its turn.",
            label,
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        ).labels(name)
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From a request to its first token.",
            label,
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        ).labels(name)
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From a request to its last token.",
            label,
            buckets=_WHOLE_S,
            registry=self.registry,
        ).labels(name)
        self._name = name

    def count_response(self, status: int, results: Iterable[Result]) -> None:
        """Count one request that has ended, and the answers that it was given."""
        self._responses.labels(status).inc()
        for result in results:
            stats = result.stats
            self._finished.labels(self._name, result.finish_reason).inc()
            self._waited.observe(stats.queue_s)
            self._first_token.observe(stats.ttft_s)
            self._whole.observe(stats.queue_s + stats.prompt_s + stats.decode_s)


class _StatusCollector(Collector):
    """Asks the model at each scrape, so that nothing is counted twice."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._name = name

    def collect(self) -> Iterator[Metric]:
        status = self._model.status()
        yield from _llama_metrics(status)
        yield from _vllm_metrics(status, self._name)
        yield from _own_metrics(status)


def _llama_metrics(status: ModelStatus) -> Iterator[Metric]:
    computed = status.prompt_tokens - status.cached_tokens
    for name, told, total in (
        ("prompt_tokens", "Prompt tokens computed.", computed),
        ("prompt_seconds", "Seconds spent on prompts.", status.prompt_s),
        ("tokens_predicted", "Tokens generated.", status.emitted),
        ("tokens_predicted_seconds", "Seconds spent on generating.", status.decode_s),
    ):
        yield CounterMetricFamily(f"llamacpp:{name}", told, total)
    for name, told, value in (
        ("prompt_tokens_seconds", "Prompt tokens per second.", _rate(computed, status.prompt_s)),
        (
            "predicted_tokens_seconds",
            "Tokens per second of one answer.",
            _rate(status.emitted, status.decode_s),
        ),
        ("requests_processing", "Requests at work.", status.n_busy),
        ("requests_deferred", "Requests that wait for a slot.", status.n_waiting),
        (
            "kv_cache_usage_ratio",
            "Share of the cells in use.",
            _rate(status.cells_used, status.n_ctx),
        ),
        ("kv_cache_tokens", "Cells in use.", status.cells_used),
    ):
        yield GaugeMetricFamily(f"llamacpp:{name}", told, value)


def _vllm_metrics(status: ModelStatus, model_name: str) -> Iterator[Metric]:
    for name, told, value in (
        ("num_requests_running", "Requests at work.", status.n_busy),
        ("num_requests_waiting", "Requests that wait for a slot.", status.n_waiting),
        (
            "kv_cache_usage_perc",
            "Share of the cells in use.",
            _rate(status.cells_used, status.n_ctx),
        ),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", told, labels=["model_name"])
        gauge.add_metric([model_name], value)
        yield gauge
    for name, told, total in (
        ("prompt_tokens", "Prompt tokens, cached ones included.", status.prompt_tokens),
        ("generation_tokens", "Tokens generated.", status.emitted),
        ("prefix_cache_queries", "Prompt tokens looked up in the caches.", status.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found there.", status.cached_tokens),
        ("spec_decode_num_drafts", "Drafts that were verified.", sum(status.position_drafted[:1])),
        ("spec_decode_num_draft_tokens", "Drafted tokens that were verified.", status.drafted),
        ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", status.accepted),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", told, labels=["model_name"])
        counter.add_metric([model_name], total)
        yield counter
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens accepted, by their place in the draft.",
        labels=["model_name", "position"],
    )
    for position, total in enumerate(status.position_accepted):
        accepted.add_metric([model_name, str(position)], total)
    yield accepted


def _own_metrics(status: ModelStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("dflash_local:slots", "Requests that can run at once.", status.n_slots)
    yield CounterMetricFamily("dflash_local:requests", "Requests that have ended.", status.requests)
    drafted = CounterMetricFamily(
        "dflash_local:drafted_tokens_per_pos",
        "Drafted tokens that were verified, by their place in the draft.",
        labels=["position"],
    )
    for position, total in enumerate(status.position_drafted):
        drafted.add_metric([str(position)], total)
    yield drafted
    yield GaugeMetricFamily(
        "dflash_local:cache_store_bytes",
        "Bytes of prefixes that left their slot and are kept.",
        status.cache_bytes,
    )
    yield CounterMetricFamily(
        "dflash_local:cache_store_hits", "Prefixes taken from there.", status.cache_hits
    )


def _rate(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
