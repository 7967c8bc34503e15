"""e2e: a real model, prefill and decode in processes of their own, against one loop.

SmolLM2 in float32, one thread per worker, KV over shared memory: router, prefill and decode
leaders and workers as ``pdcore up`` starts them, asked over HTTP. The reference is the same
engine and scheduler in one process without HTTP (benchmarks/_colocated.py). Requests
alternate between the two, so that both see the same machine. Then the same requests at
concurrency 4 on each side: how long does a stream stand still?
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from benchmarks._colocated import ColocatedProcess, Heard, Job
from benchmarks.common import RUNS, Result, check, result_of, row
from pdcore.config import InstanceConfig
from pdcore.config_loader import load_environment
from pdcore.control.bootstrap_client import split_host_port
from pdcore.engine.load import load_tokenizer, locate_embedded_model
from pdcore.server.client import HttpClient, Origin
from pdcore.server.cluster import Cluster, ClusterConfig
from pdcore.server.exchange import Timeout

SIZES = (64, 256, 512, 1024)
QUICK_SIZES = (64, 256)
#: A prefill that is long enough to be felt by who decodes beside it.
QUICK_MIX = (64, 512)
SHORT_RUNS = 15
#: Output tokens of a request whose first token is what counts; compared with the reference.
TTFT_TOKENS = 4
NUM_REQUESTS = 20
QUICK_REQUESTS = 6
CONCURRENCY = 4
NUM_BLOCKS = 512
TEXT = Path(__file__).resolve().parent.parent / "docs" / "requirements.md"


class _Event(msgspec.Struct):
    token_ids: list[int] = []
    finish_reason: str | None = None
    timeline: dict[str, float] = {}
    error: dict[str, object] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Client:
    """Streams answers of the cluster and notes when each token arrived."""

    def __init__(self, url: str) -> None:
        self._origin = Origin(*split_host_port(url))
        self._http = HttpClient()
        #: Decode's account of each request, in seconds, in order of their ends.
        self.timelines: list[dict[str, float]] = []

    async def ask(self, job: Job) -> Heard:
        body = {
            "prompt": list(job.prompt),
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        started = time.perf_counter()
        response = await self._http.request(
            "POST",
            self._origin,
            "/generate",
            msgspec.json.encode(body),
            headers=[("content-type", "application/json")],
            timeout=Timeout(total_s=300.0),
        )
        ids: list[int] = []
        moments: list[float] = []
        rest = b""
        while chunk := await response.next_chunk():
            now = time.perf_counter() - started
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data != b"[DONE]":
                    decoded = _decode_event(data)
                    check(decoded.error is None, f"the cluster answered {decoded.error}")
                    ids += decoded.token_ids
                    moments += [now] * len(decoded.token_ids)
                    if decoded.timeline:
                        self.timelines.append(decoded.timeline)
        check(response.status == 200, f"HTTP {response.status}: {rest[:200]!r}")
        return Heard(tuple(ids), tuple(moments))

    async def ask_all(self, jobs: Sequence[Job], concurrency: int) -> list[Heard]:
        """At most ``concurrency`` at once; results in the order of jobs."""
        heard: dict[int, Heard] = {}
        left = iter(enumerate(jobs))

        async def user() -> None:
            for i, job in left:
                heard[i] = await self.ask(job)

        await asyncio.gather(*(user() for _ in range(concurrency)))
        return [heard[i] for i in range(len(jobs))]

    async def close(self) -> None:
        await self._http.aclose()


@asynccontextmanager
async def cluster(cache_dir: Path) -> AsyncIterator[Cluster]:
    run_dir = Path(tempfile.mkdtemp(prefix="pdcore-bench-"))
    config = InstanceConfig()
    running = Cluster(ClusterConfig(config), cache_dir, run_dir, lambda: None)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


@contextmanager
def colocated(cache_dir: Path) -> Iterator[ColocatedProcess]:
    process = ColocatedProcess(cache_dir, NUM_BLOCKS)
    try:
        yield process
    finally:
        process.close()


def prompts(cache_dir: Path) -> Iterator[list[int]]:
    """Endless windows of the requirements page, each another one: real text, so that the
    best token leads clearly."""
    ids = load_tokenizer(None, cache_dir).encode(TEXT.read_text(encoding="utf-8"))
    check(len(ids) > 4 * max(SIZES), "the text is too short")
    for i in itertools.count():
        start = i * 97 % (len(ids) - max(SIZES))
        yield ids[start : start + max(SIZES)]


async def measure_ttft(
    client: Client, reference: ColocatedProcess, text: Iterator[list[int]], size: int, runs: int
) -> tuple[list[Heard], list[Heard]]:
    """Pairs, the order turning; every pair must have said the same."""
    ours: list[Heard] = []
    theirs: list[Heard] = []
    for i in range(runs):
        job = Job(tuple(next(text)[:size]), TTFT_TOKENS)
        for side in ("ours", "theirs") if i % 2 == 0 else ("theirs", "ours"):
            if side == "ours":
                ours.append(await client.ask(job))
            else:
                theirs += await asyncio.to_thread(reference.run, [job], 1)
        check(ours[-1].token_ids == theirs[-1].token_ids, f"tokens differ at {size}")
    return ours, theirs


async def measure_gaps(
    client: Client, reference: ColocatedProcess, text: Iterator[list[int]], quick: bool
) -> list[Result]:
    """The same requests on both sides. One run each: there are many gaps in it."""
    sizes = QUICK_MIX if quick else SIZES
    num_requests, max_tokens = (QUICK_REQUESTS, 8) if quick else (NUM_REQUESTS, 24)
    jobs = [
        # Different lengths of output, so that arrivals fall into others' decoding.
        Job(tuple(next(text)[: sizes[i % len(sizes)]]), max_tokens + i % 3 * 4)
        for i in range(num_requests)
    ]
    started = time.perf_counter()
    ours = await client.ask_all(jobs, CONCURRENCY)
    middle = time.perf_counter()
    theirs = await asyncio.to_thread(reference.run, jobs, CONCURRENCY)
    ended = time.perf_counter()
    check([h.token_ids for h in ours] == [h.token_ids for h in theirs], "tokens differ")
    tokens = sum(len(h.token_ids) for h in ours)
    name, peer = f"e2e/{num_requests} requests", "colocated, prefill first"
    return [
        row(
            name,
            f"largest inter-token gap at concurrency {CONCURRENCY}",
            "ms",
            [max(h.largest_gap_s for h in ours) * 1e3],
            peer,
            [max(h.largest_gap_s for h in theirs) * 1e3],
            better="lower",
            target="ratio <= 0.15",
            meets=lambda ratio: ratio <= 0.15,
        ),
        row(
            name,
            f"output tokens per second at concurrency {CONCURRENCY}",
            "1/s",
            [tokens / (middle - started)],
            peer,
            [tokens / (ended - middle)],
            better="higher",
            target="",
        ),
    ]


async def measure(quick: bool) -> Result:
    check(locate_embedded_model() is not None, "the embedded model is not installed")
    cache_dir = load_environment().cache_dir
    text = prompts(cache_dir)
    rows: list[Result] = []
    async with cluster(cache_dir) as running:
        client = Client(running.url)
        try:
            with colocated(cache_dir) as reference:
                warm = Job(tuple(next(text)[:32]), 2)
                await client.ask(warm)
                await asyncio.to_thread(reference.run, [warm], 1)
                for size in QUICK_SIZES if quick else SIZES:
                    # A short one is no longer than a neighbour's time slice: more of them.
                    runs = RUNS if quick or size > 256 else SHORT_RUNS
                    ours, theirs = await measure_ttft(client, reference, text, size, runs)
                    passes = [t["prefill_prefill"] for t in client.timelines[-len(ours) :]]
                    rows += ttft_rows(size, ours, theirs, passes)
                rows += await measure_gaps(client, reference, text, quick)
        finally:
            await client.close()
    # Every token of every pair above was compared.
    return result_of("e2e", rows, tokens_equal=True, last_timeline=client.timelines[-1])


def ttft_rows(
    size: int, ours: Sequence[Heard], theirs: Sequence[Heard], passes: Sequence[float]
) -> list[Result]:
    """Against the reference, and against the same requests' own forward passes: the second
    does not depend on what else the machine did in the meantime."""
    most = 1.15 if size < 256 else 1.05
    limit = statistics.median(h.ttft_s * 1e3 for h in theirs)
    return [
        row(
            f"e2e/{size} tokens",
            "time to first token",
            "ms",
            [h.ttft_s * 1e3 for h in ours],
            peer,
            peer_values,
            better="lower",
            target=f"ratio <= {most}",
            meets=lambda ratio: ratio <= most,
            limit=limit,
        )
        for peer, peer_values in (
            ("colocated, no HTTP", [h.ttft_s * 1e3 for h in theirs]),
            ("its own forward passes", [s * 1e3 for s in passes]),
        )
    ]


def run(quick: bool) -> Result:
    return asyncio.run(measure(quick))
