"""``pdcore demo``: a whole cluster, a few questions, and where the time went."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pdcore.cli.options import EngineFlags, Switch

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from pdcore.cli.asking import Answered
    from pdcore.config import ModelConfig
    from pdcore.server.cluster import Cluster
    from pdcore.server.text import Tokenizer

MAX_TOKENS: Final = 48
QUESTIONS: Final = (
    "What is the capital of France?",
    "Write one short sentence about the sea.",
    "Why is it useful to keep prefill and decode of a language model apart?",
)


class Prompt(NamedTuple):
    title: str
    token_ids: list[int]


def demo(
    *,
    keep: Switch = False,
    port: int = 0,
    prefill: int = 1,
    decode: int = 1,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    prefill_dp: int = 1,
    decode_dp: int = 1,
    max_tokens: int = MAX_TOKENS,
    engine: EngineFlags | None = None,
) -> int:
    """Start a cluster on this machine, ask the model a few things, show where the time went.

    A router, a prefill and a decode instance run as processes of their own. Each question
    goes to the router; prefill computes its KV cache, which moves to decode, which answers.
    The first start converts the model's weights, once.

    Examples:

    - `pdcore demo`
    - `pdcore demo --keep`: then use your own client
    - `pdcore demo --simulated`: no model, no torch

    Parameters
    ----------
    keep
        Stay up afterwards, until Ctrl-C.
    port
        The router's port; 0 takes a free one.
    prefill
        Number of prefill instances.
    decode
        Number of decode instances.
    prefill_tp
        Tensor parallel ranks of each prefill instance, a process each. They must divide what
        the model splits: 1 or 3 for the one that is built in.
    decode_tp
        The same of each decode instance; the two may differ.
    prefill_dp
        Data parallel groups of each prefill instance, of prefill_tp ranks each.
    decode_dp
        The same of each decode instance.
    max_tokens
        Longest answer in tokens.
    """
    from pdcore.cli.options import instance_config
    from pdcore.cli.session import PipeConsole, run_cluster, until_told
    from pdcore.cli.workplace import workplace
    from pdcore.config_loader import load_environment
    from pdcore.server.cluster import ClusterConfig

    started_s = time.monotonic()
    env = load_environment()
    config = instance_config(engine or EngineFlags(), env)
    cluster_config = ClusterConfig(
        config,
        port=port,
        num_prefill=prefill,
        num_decode=decode,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_dp=prefill_dp,
        decode_dp=decode_dp,
    )
    place = workplace(env)
    console = PipeConsole()

    async def serve(cluster: Cluster, stopping: asyncio.Event) -> int:
        ready_s = time.monotonic() - started_s
        console.print(f"cluster ready after {ready_s:.1f} s: {cluster.url}\n", highlight=False)
        asking = asyncio.ensure_future(
            _ask_all(cluster, config.model, place.cache_dir, max_tokens, console)
        )
        told = asyncio.ensure_future(until_told(cluster, stopping))
        await asyncio.wait([asking, told], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            return await told
        status = asking.result()
        if status == 0 and keep and not place.env.demo_exit:
            _invite(console, cluster.url, config.model)
            return await told
        told.cancel()
        return status

    return asyncio.run(run_cluster(cluster_config, place, console, serve))


async def _ask_all(
    cluster: Cluster, model: ModelConfig, cache_dir: Path, max_tokens: int, console: Console
) -> int:
    """Every question in turn, then the table; returns the exit status."""
    from pdcore.cli.asking import NoAnswer, ask
    from pdcore.cli.options import complain
    from pdcore.control.bootstrap_client import split_host_port
    from pdcore.server.client import HttpClient, Origin
    from pdcore.server.exchange import HttpError
    from pdcore.server.models import open_model

    origin = Origin(*split_host_port(cluster.url))
    served = await asyncio.to_thread(open_model, model, cache_dir)
    prompts = make_prompts(served.text.tokenizer, is_simulated=model.is_simulated)
    client = HttpClient()
    answers: list[Answered] = []
    try:
        for prompt in prompts:
            console.print(f"> {prompt.title}", style="bold", markup=False, highlight=False)
            answers.append(await ask(client, origin, prompt.token_ids, max_tokens, _write))
            _write("\n\n")
    except (NoAnswer, HttpError) as error:
        _write("\n")
        complain(f"no answer: {error}")
        return 1
    finally:
        await client.aclose()
    console.print(timeline_table(answers, served.kv_token_bytes))
    return 0


def make_prompts(tokenizer: Tokenizer, *, is_simulated: bool) -> list[Prompt]:
    """Questions through the model's chat template; token ids where there is no text."""
    if is_simulated:
        return [
            Prompt(f"{size} token ids", [3 + (7 * i + size) % 900 for i in range(size)])
            for size in (5, 64, 500)
        ]
    chats = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [
        Prompt(text, tokenizer.encode(chat)) for text, chat in zip(QUESTIONS, chats, strict=True)
    ]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def timeline_table(answers: Sequence[Answered], token_bytes: int) -> Table:
    """Per request: prompt and output tokens, where its time went, and what was moved."""
    from rich.table import Table

    from pdcore.cli.asking import stages

    table = Table(
        title="where the time went (ms)",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("#", no_wrap=True)
    times = ("queue", "prefill", "handshake", "transfer", "decode")
    for column in ("tokens", *times, "KV", "rate"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, answered in enumerate(answers, 1):
        s = stages(answered, token_bytes)
        seconds = (s.queue_s, s.prefill_s, s.handshake_s, s.transfer_s, s.decode_s)
        table.add_row(
            str(number),
            f"{answered.prompt_tokens}+{answered.completion_tokens}",
            *(f"{one * 1000:.1f}" for one in seconds),
            size(s.kv_bytes),
            f"{size(s.rate)}/s" if s.rate else "",
        )
    return table


def size(num_bytes: float) -> str:
    """``1572864`` -> ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _invite(console: Console, url: str, model: ModelConfig) -> None:
    path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hi"}]'
    if model.is_simulated:
        # It has no text: neither a chat template nor words.
        path, asked = "completions", '"prompt": [5, 6, 7]'
    console.print(
        f"\nstill up: {url}  (Ctrl-C drains)\n"
        f"  curl -N {url}/v1/{path} -H 'content-type: application/json' \\\n"
        f"    -d '{{{asked}, \"stream\": true}}'",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
