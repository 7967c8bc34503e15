"""Metrics of one app: its own registry, cached children, never a label per room.

``labels()`` costs three times an increment and rendering many series blocks for tens of
milliseconds, so children are kept and rendering runs in a thread. Numbers that live elsewhere
(queues, workers) are copied on the event loop right before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: A worker may report this many numbers; further ones are left out.
_MAX_SAMPLES: Final = 4096


class Sample(NamedTuple):
    """A number read off when metrics are rendered. ``labels`` have few values each."""

    name: str
    labels: Mapping[str, str]
    value: float


class _Snapshot(Collector):
    """Turns samples into one gauge family per name."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for sample in self.samples:
            family = families.get(sample.name)
            if family is None:
                names = list(sample.labels)
                family = GaugeMetricFamily(sample.name, "Read off when scraped.", labels=names)
                families[sample.name] = family
            family.add_metric(list(sample.labels.values()), sample.value)
        yield from families.values()


class Metrics:
    """``prefix`` is pdcore_router or pdcore_instance; ``read`` supplies the samples."""

    def __init__(self, prefix: str, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read
        self._registry = CollectorRegistry(auto_describe=False)
        self._snapshot = _Snapshot()
        self._registry.register(self._snapshot)
        self._requests = Counter(
            f"{prefix}_requests", "Finished.", ["endpoint", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            f"{prefix}_request_seconds",
            "From arrival to the last byte.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_token = Histogram(
            f"{prefix}_first_token_seconds",
            "From arrival to the first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        #: Requests that have begun and not ended.
        self.in_flight = 0
        gauge = Gauge(f"{prefix}_in_flight", "Not yet finished.", registry=self._registry)
        gauge.set_function(lambda: self.in_flight)
        self._children: dict[tuple[str, int], Counter] = {}
        self._timers: dict[str, Histogram] = {}

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def finished(self, endpoint: str, status: int, seconds: float) -> None:
        """``endpoint`` is a route, never a path that a client made up."""
        child = self._children.get((endpoint, status))
        if child is None:
            child = self._requests.labels(endpoint, str(status))
            self._children[endpoint, status] = child
            self._timers.setdefault(endpoint, self._seconds.labels(endpoint))
        child.inc()
        self._timers[endpoint].observe(seconds)

    async def render(self) -> bytes:
        """The exposition text. Samples are read here, on the loop; the text is made in a
        thread, so that no request waits for it."""
        self._snapshot.samples = list(islice(self._read(), _MAX_SAMPLES))
        return await asyncio.to_thread(generate_latest, self._registry)
