"""Numbers for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tfm_export.model import Observer, Report

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of all models of a server.

    Args:
        registry: where they are kept; None for one of their own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r, model = self.registry, ["model"]
        self.answers = Counter("tfm_export_answers", "Sources answered.", ["model", "outcome"], registry=r)
        self.source_tokens = Counter("tfm_export_source_tokens", "Tokens of sources.", model, registry=r)
        self.target_tokens = Counter("tfm_export_target_tokens", "Tokens of best hypotheses.", model, registry=r)
        self.seconds = Histogram("tfm_export_seconds", "From call to answer.", model, buckets=SECONDS, registry=r)
        self.queue = Histogram("tfm_export_queue_seconds", "In the queue.", model, buckets=SECONDS, registry=r)
        self.first = Histogram(
            "tfm_export_first_token_seconds", "To the first token of a stream.", model, buckets=SECONDS, registry=r
        )
        self.sizes = Histogram("tfm_export_batch_size", "Sources in a step.", model, buckets=SIZES, registry=r)
        self.steps = Counter("tfm_export_step_seconds", "In steps.", model, registry=r)
        self.waiting = Gauge("tfm_export_waiting", "Sources in the queue.", model, registry=r)
        self.responses = Counter("tfm_export_http_responses", "Responses.", ["status"], registry=r)

    def page(self) -> bytes:
        """The numbers in Prometheus' text format."""
        return generate_latest(self.registry)


class PrometheusObserver(Observer):
    """Counts what a model does.

    >>> from tfm_export.serve.metrics import Metrics, PrometheusObserver
    >>> metrics = Metrics()
    >>> with tfm_export.load("tfm_bundle", observer=PrometheusObserver(metrics, "g2p")) as model:
    ...     _ = model.generate_async("hello").result()
    >>> 'tfm_export_answers_total{model="g2p",outcome="end token"} 1.0' in metrics.page().decode()
    True

    Args:
        metrics: where to.
        model: the name of the model.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._tokens = metrics.source_tokens.labels(model), metrics.target_tokens.labels(model)
        self._times = metrics.seconds.labels(model), metrics.queue.labels(model), metrics.first.labels(model)
        self._steps = metrics.sizes.labels(model), metrics.steps.labels(model)
        self._waiting = metrics.waiting.labels(model)

    def queued(self, waiting: int) -> None:
        """Note the length of the queue."""
        self._waiting.set(waiting)

    def stepped(self, size: int, seconds: float) -> None:
        """Count a step."""
        self._steps[0].observe(size)
        self._steps[1].inc(seconds)

    def answered(self, report: Report) -> None:
        """Count an answer."""
        self._metrics.answers.labels(self._model, report.outcome).inc()
        self._tokens[0].inc(report.source_tokens)
        self._tokens[1].inc(report.target_tokens)
        self._times[0].observe(report.seconds)
        self._times[1].observe(report.queue_seconds)
        if report.first_token_seconds is not None:
            self._times[2].observe(report.first_token_seconds)
