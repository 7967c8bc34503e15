"""Metrics of one app."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from pdcore.server.metrics import Metrics, Sample
from tests.unit.server.kit import run


def text_of(metrics: Metrics) -> str:
    return run(metrics.render()).decode()


def test_counters_histograms_and_samples_are_rendered() -> None:
    samples = [
        Sample("pdcore_worker", {"rank": "0", "name": "steps"}, 3.0),
        Sample("pdcore_worker", {"rank": "1", "name": "steps"}, 4.0),
    ]
    metrics = Metrics("pdcore_instance", lambda: samples)
    metrics.in_flight += 1
    metrics.first_token(0.2)
    metrics.finished("/generate", 200, 0.5)
    metrics.finished("/generate", 200, 0.5)
    metrics.finished("/generate", 503, 0.1)
    text = text_of(metrics)
    assert 'pdcore_instance_requests_total{endpoint="/generate",status="200"} 2.0' in text
    assert 'pdcore_instance_requests_total{endpoint="/generate",status="503"} 1.0' in text
    assert 'pdcore_instance_request_seconds_count{endpoint="/generate"} 3.0' in text
    assert "pdcore_instance_in_flight 1.0" in text
    assert 'pdcore_worker{name="steps",rank="1"} 4.0' in text.replace(
        'rank="1",name="steps"', 'name="steps",rank="1"'
    )


def test_each_app_has_its_own_registry() -> None:
    first, second = (Metrics("pdcore_router", lambda: ()) for _ in range(2))
    first.finished("/generate", 200, 0.1)
    assert 'status="200"' in text_of(first)
    assert 'status="200"' not in text_of(second)


def test_the_number_of_samples_is_bounded() -> None:
    def many() -> Iterator[Sample]:
        for i in range(10_000_000):
            yield Sample("pdcore_worker", {"rank": str(i), "name": "x"}, 1.0)

    assert text_of(Metrics("pdcore_instance", many)).count("pdcore_worker{") == 4096


def test_samples_are_read_on_the_loop_and_rendered_off_it() -> None:
    async def play() -> None:
        def read() -> list[Sample]:
            assert asyncio.get_running_loop()
            return []

        await Metrics("pdcore_router", read).render()

    run(play())
