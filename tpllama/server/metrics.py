"""What Prometheus reads: counts and times per model, and the engine's state at the moment it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from tpllama.server.switch import Switch

Outcome = Literal["stop", "length", "error", "cancelled", "refused"]
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
# Names that clients make up must not become series of their own.
UNKNOWN_MODEL = "unknown"


class Metrics:
    """The server's series. `watch` adds what is read from the engine."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        by_model: dict[str, Any] = {"labelnames": ["model"], "registry": self._registry}
        self._requests = Counter(
            "tpllama_requests", "Requests by how they ended", ["model", "outcome"], registry=self._registry
        )
        self._prompt_tokens = Counter("tpllama_prompt_tokens", "Tokens of prompts", **by_model)
        self._new_tokens = Counter("tpllama_generated_tokens", "Tokens that were generated", **by_model)
        self._first = Histogram(
            "tpllama_time_to_first_token_seconds", "From a request's arrival to its first token",
            buckets=_SECONDS, **by_model,
        )  # fmt: skip
        self._between = Histogram(
            "tpllama_inter_token_seconds", "From one token of a text to the next", buckets=_TOKEN_SECONDS, **by_model
        )
        self._queued = Histogram(
            "tpllama_queue_seconds", "From a request's arrival to its first step", buckets=_SECONDS, **by_model
        )
        self._whole = Histogram("tpllama_request_seconds", "Of whole requests", buckets=_SECONDS, **by_model)
        self._loads = Counter("tpllama_loads", "Loads by how they ended", ["model", "outcome"], registry=self._registry)
        self._load_seconds = Gauge("tpllama_load_seconds", "How long the model's last load took", **by_model)

    def count_request(self, model: str, outcome: Outcome, seconds: float | None = None) -> None:
        self._requests.labels(model, outcome).inc()
        if seconds is not None:
            self._whole.labels(model).observe(seconds)

    def count_tokens(self, model: str, prompt: int, new: int) -> None:
        self._prompt_tokens.labels(model).inc(prompt)
        self._new_tokens.labels(model).inc(new)

    def note_first_token(self, model: str, seconds: float, queued_seconds: float) -> None:
        self._first.labels(model).observe(seconds)
        self._queued.labels(model).observe(queued_seconds)

    def note_token(self, model: str, seconds: float) -> None:
        self._between.labels(model).observe(seconds)

    def count_load(self, model: str, seconds: float | None) -> None:
        """seconds: None for a load that failed."""
        self._loads.labels(model, "failed" if seconds is None else "loaded").inc()
        if seconds is not None:
            self._load_seconds.labels(model).set(seconds)

    def watch(self, switch: Switch) -> None:
        self._registry.register(_EngineState(switch))

    def text(self) -> bytes:
        """In Prometheus' text form."""
        return generate_latest(self._registry)


class _EngineState:
    """A collector of prometheus-client: what the engine is doing now."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def describe(self) -> list[Metric]:
        """None, so that nothing is collected when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        loaded, is_healthy = self._switch.seat.loaded, self._switch.seat.failure is None
        yield GaugeMetricFamily("tpllama_line", "Requests that wait for a model", value=self._switch.num_waiting)
        yield GaugeMetricFamily("tpllama_healthy", "0 while a model that failed is gone", is_healthy)
        if loaded is None or loaded.failure is not None:
            return
        engine, model = loaded.llm.engine, [loaded.entry.model_id]
        scheduler, pool = engine.scheduler, engine.pool
        # The bare minimum of reads, each of one attribute: the engine's thread goes on meanwhile.
        gauges = (
            ("tpllama_running", "Texts in the engine's steps", len(scheduler.running)),
            ("tpllama_waiting", "Texts that wait in the engine", len(scheduler.waiting)),
            ("tpllama_cache_blocks", "Blocks of the cache", pool.size),
            ("tpllama_cache_used_blocks", "Blocks of the cache that requests hold", pool.num_used),
        )
        for name, help_text, value in gauges:
            gauge = GaugeMetricFamily(name, help_text, labels=["model"])
            gauge.add_metric(model, value)
            yield gauge
        counters = (
            ("tpllama_preempted", "Texts that had to make room", scheduler.num_preempted),
            ("tpllama_cache_found_tokens", "Tokens of prompts that the cache had already", scheduler.num_found),
        )
        for name, help_text, value in counters:
            counter = CounterMetricFamily(name, help_text, labels=["model"])
            counter.add_metric(model, value)
            yield counter
