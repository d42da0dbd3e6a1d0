"""`/metrics` for Prometheus, in llama.cpp's and vLLM's names where they have one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class Metrics:
    """What one application counts; its registry is its own, so that there may be several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._responses = Counter(
            "dflash_local:http_responses",
            "Requests by the status that they were answered with; 0 where the client left first.",
            ["status"],
            registry=self.registry,
        )

    def count_response(self, status: int) -> None:
        """Count one request that has ended."""
        self._responses.labels(status).inc()
