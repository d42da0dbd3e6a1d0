"""`/metrics` for Prometheus, under llama.cpp's and vLLM's names where they have one.

Names and meanings: llama.cpp, tools/server/README.md; vLLM, vllm/v1/metrics/loggers.py and
vllm/v1/spec_decode/metrics.py. Counters are totals since the server began. If several models
are served, all values have the label `model_name`; models that are not loaded have no gauges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_local.result import ModelStatus
from dflash_local.server.http.access_log import ModelResult
from dflash_local.server.http.errors import check_switch
from dflash_local.server.models.pool import ModelPool

router = APIRouter()

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 960)
_TIMES = (
    ("vllm:request_queue_time_seconds", "From a request to its turn.", _FIRST_TOKEN_S),
    ("vllm:time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN_S),
    ("vllm:e2e_request_latency_seconds", "From a request to its last token.", _WHOLE_S),
)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """The metrics, as text for Prometheus."""
    check_switch(request.app.state.settings.metrics, "--no-metrics")
    counted: Metrics = request.app.state.metrics
    return Response(
        generate_latest(counted.registry),
        media_type=CONTENT_TYPE_LATEST,
        headers={"Process-Start-Time-Unix": str(request.app.state.created)},  # llama-server's
    )


class Metrics:
    """The counts of one application. Its registry is its own, so that there may be several."""

    def __init__(self, pool: ModelPool) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(pool))
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
        # By the models' names in answers: vLLM's dashboards sort by that label.
        self._times = [
            Histogram(name, help, ("model_name",), buckets=buckets, registry=self.registry)
            for name, help, buckets in _TIMES
        ]
        for name in pool.names:  # so that there are zeros from the start
            for histogram in self._times:
                histogram.labels(name)

    def count_request(self, status: int, results: Sequence[ModelResult]) -> None:
        """Count one request that has ended, and the answers that were generated for it."""
        self._responses.labels(status).inc()
        for name, result in results:
            stats = result.stats
            self._finished.labels(name, result.finish_reason).inc()
            whole = stats.queue_s + stats.prompt_s + stats.decode_s
            for times, seconds in zip(
                self._times, (stats.queue_s, stats.ttft_s, whole), strict=True
            ):
                times.labels(name).observe(seconds)


class _StatusCollector(Collector):
    """Asks the models at each scrape, so that nothing is counted twice."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        models = list(self._pool.models.values())
        counted = [(each, each.counted) for each in models]
        known = [(each.name, status) for each, status in counted if status is not None]
        loaded = [(each.name, status) for each, status in counted if status and each.model]
        for kind, families, statuses in (
            (CounterMetricFamily, _COUNTERS, known),
            (GaugeMetricFamily, _GAUGES, loaded),
        ):
            for name, help, read in families:
                named = len(models) > 1 or name.startswith("vllm:")
                labels = ["model_name"] * named + ["position"] * name.endswith("_per_pos")
                family = kind(name, help, labels=labels)
                for model, status in statuses:
                    own = [model] * named
                    value = getattr(status, read) if isinstance(read, str) else read(status)
                    if isinstance(value, Sequence):
                        for position, part in enumerate(value):
                            family.add_metric([*own, str(position)], part)
                    else:
                        family.add_metric(own, value)
                yield family


_Families = tuple[tuple[str, str, str | Callable[[ModelStatus], float]], ...]
"""Names of metrics, their meanings, and their values: a number of a model's status by its name, or
one for each place in the draft; or made from several."""


def _rate(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0


def _computed(status: ModelStatus) -> int:
    return status.prompt_tokens - status.cached_tokens


def _usage(status: ModelStatus) -> float:
    return _rate(status.cells_used, status.n_ctx)


def _drafts(prefix: str) -> _Families:
    name = f"{prefix}:spec_decode_num"
    return (
        (f"{name}_drafts", "Drafts that were verified.", lambda s: sum(s.position_drafted[:1])),
        (f"{name}_draft_tokens", "Drafted tokens that were verified.", "drafted"),
        (f"{name}_accepted_tokens", "Drafted tokens accepted.", "accepted"),
    )


_COUNTERS: _Families = (
    ("llamacpp:prompt_tokens", "Prompt tokens computed.", _computed),
    ("llamacpp:prompt_tokens_cached", "Prompt tokens found in the caches.", "cached_tokens"),
    ("llamacpp:prompt_seconds", "Seconds spent on prompts.", "prompt_s"),
    ("llamacpp:tokens_predicted", "Tokens generated.", "emitted"),
    ("llamacpp:tokens_predicted_seconds", "Seconds spent on generating.", "decode_s"),
    ("llamacpp:n_decode", "Passes of the model.", "passes"),
    *_drafts("llamacpp"),
    ("vllm:prompt_tokens", "Prompt tokens, cached ones included.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "emitted"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the caches.", "prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found there.", "cached_tokens"),
    *_drafts("vllm"),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens accepted, by their place in the draft.",
        "position_accepted",
    ),
    (
        "dflash_local:copied_tokens",
        "Drafted tokens that were verified and no drafter proposed: the text had them already.",
        "copied",
    ),
    ("dflash_local:copied_accepted_tokens", "Those of them that were accepted.", "copied_accepted"),
    ("dflash_local:requests", "Requests that have ended.", "requests"),
    (
        "dflash_local:drafted_tokens_per_pos",
        "Drafted tokens that were verified, by their place in the draft.",
        "position_drafted",
    ),
    ("dflash_local:cache_store_hits", "Prefixes taken from the store.", "cache_hits"),
)

_GAUGES: _Families = (
    (
        "llamacpp:prompt_tokens_seconds",
        "Prompt tokens per second.",
        lambda s: _rate(_computed(s), s.prompt_s),
    ),
    (
        "llamacpp:predicted_tokens_seconds",
        "Tokens per second of one answer.",
        lambda s: _rate(s.emitted, s.decode_s),
    ),
    (
        "llamacpp:n_busy_slots_per_decode",
        "Requests in a pass, on average.",
        lambda s: _rate(s.slots_in_passes, s.passes),
    ),
    ("llamacpp:n_tokens_max", "The most tokens of one text.", "longest"),
    ("llamacpp:requests_processing", "Requests that run.", "n_busy"),
    ("llamacpp:requests_deferred", "Requests that wait for a slot.", "n_waiting"),
    ("llamacpp:kv_cache_usage_ratio", "Share of the cells in use.", _usage),
    ("llamacpp:kv_cache_tokens", "Cells in use.", "cells_used"),
    ("vllm:num_requests_running", "Requests that run.", "n_busy"),
    ("vllm:num_requests_waiting", "Requests that wait for a slot.", "n_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of the cells in use.", _usage),
    ("dflash_local:slots", "Requests that can run at once.", "n_slots"),
    (
        "dflash_local:cache_store_bytes",
        "Bytes of prefixes that left their slot and are kept.",
        "cache_bytes",
    ),
)
