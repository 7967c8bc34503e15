"""Clients of a simulated cluster: what they send, what they got, and whether that is right.

A request's tokens follow from its prompt (:func:`~pdcore.engine.simulated.simulated_tokens`),
so a 200 is right or wrong without looking at the cluster. Anything else must say precisely
what happened: a status and a code that a client can act on, within the request's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from pdcore.engine.simulated import simulated_tokens
from pdcore.errors import HTTP_STATUS
from pdcore.server.client import ConnectFailed, HttpError, Response, Timeout
from pdcore.server.within import Within
from pdcore.sim.cluster import GRACE_S, ROUTER, Cluster
from pdcore.sim.plan import Request
from pdcore.sim.site import MODEL
from pdcore.sim.wire import WireClient
from pdcore.types import SamplingParams

#: What a failure in this world may be called. Everything else is a bug: the requests are
#: valid, the instances agree, and no code of ours may raise.
ALLOWED_CODES: Final = frozenset(
    {
        "cancelled",
        "corrupted",
        "deadline_exceeded",
        "out_of_memory",
        "overloaded",
        "peer_lost",
        "prefill_failed",
        "shutting_down",
        "stale_route",
        "transfer_failed",
        "unavailable",
        "unreachable",
        "worker_lost",
    }
)
#: The same while nothing has gone wrong yet: the load alone can do no more.
CALM_CODES: Final = frozenset({"deadline_exceeded", "out_of_memory", "overloaded", "room_in_use"})
#: Networks and queues between client and router, in seconds.
SLACK_S: Final = 1.0


class _Error(msgspec.Struct):
    code: str
    message: str = ""


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    """The parts of every answer and event that are looked at."""

    error: _Error | None = None
    output: str | None = None
    choices: list[_Choice] = []


@attrs.define(eq=False)
class Outcome:
    """What one client saw. ``ended_s`` is None while it waits."""

    request: Request
    asked_s: float
    ended_s: float | None = None
    status: int = 0
    code: str = ""
    text: str = ""
    has_done: bool = False
    #: The connection broke, or was refused.
    lost: str = ""
    is_refused: bool = False
    has_left: bool = False
    problems: list[str] = attrs.field(factory=list)

    @property
    def is_ok(self) -> bool:
        return self.status == 200 and not self.code and not self.lost

    def __str__(self) -> str:
        end = "open" if self.ended_s is None else f"{self.ended_s - self.asked_s:.3f} s"
        what = self.lost or self.code or ("left" if self.has_left else "answered")
        return f"request {self.request.number}: {self.status} {what} after {end}"


async def ask(cluster: Cluster, request: Request) -> Outcome:
    """Send one request to the router, in the client's process, and wait for its end."""
    loop = cluster.site.loop
    outcome = Outcome(request, loop.time())
    client = WireClient(cluster.site.wire, cluster.client)
    exchange, patience_s = _exchange(client, request, outcome), request.leaves_after_s
    try:
        await (exchange if patience_s is None else Within(loop.time() + patience_s, exchange))
    except TimeoutError:
        outcome.has_left = True
        cluster.site.faults["client_left"] += 1
    except HttpError as error:
        outcome.lost = str(error)
        outcome.is_refused = isinstance(error, ConnectFailed)
    outcome.ended_s = loop.time()
    cluster.site.trace("outcome", str(outcome))
    return outcome


async def _exchange(client: WireClient, request: Request, outcome: Outcome) -> None:
    """Raises HttpError, and TimeoutError where the caller's patience ends."""
    body: dict[str, object] = {
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "stream": request.is_streamed,
        "timeout": request.timeout_s,
    }
    if request.room is not None:
        body["bootstrap_room"] = request.room
    if request.seed is not None:
        body |= {"temperature": 1.0, "seed": request.seed}
    response = await client.request(
        "POST", ROUTER, request.path, msgspec.json.encode(body), timeout=Timeout(5.0, None, None)
    )
    outcome.status = response.status
    is_stream = (response.header(b"content-type") or b"").startswith(b"text/event-stream")
    if response.status == 200 and is_stream is not request.is_streamed:
        outcome.problems.append("a stream was not asked for, or asked for and not given")
    if is_stream:
        await _read_stream(response, outcome)
    else:
        _take(outcome, await response.read(), response.status)


async def _read_stream(response: Response, outcome: Outcome) -> None:
    rest = b""
    while chunk := await response.next_chunk():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if outcome.has_done or outcome.code:
                outcome.problems.append(f"the stream went on after its end: {event[:80]!r}")
            elif event == b"data: [DONE]":
                outcome.has_done = True
            else:
                _take(outcome, event.removeprefix(b"data: "), None)
    if rest:
        outcome.problems.append(f"the stream ended within an event: {rest[:80]!r}")
    if not outcome.has_done and not outcome.code:
        outcome.problems.append("the stream ended without [DONE] and without an error event")


def _take(outcome: Outcome, data: bytes, status: int | None) -> None:
    """One event of a stream, or the whole answer with its ``status``."""
    try:
        body = msgspec.json.decode(data, type=_Body)
    except msgspec.DecodeError as error:
        outcome.problems.append(f"no JSON ({error}): {data[:80]!r}")
        return
    if body.error is not None:
        outcome.code = body.error.code
        is_twin = outcome.request.room is not None and outcome.code == "room_in_use"
        if outcome.code not in ALLOWED_CODES and not is_twin:
            outcome.problems.append(f"failed as {body.error.code}: {body.error.message}")
        elif status not in (None, HTTP_STATUS[body.error.code]):
            outcome.problems.append(f"status {status} for {body.error.code}")
    outcome.text += body.output or ""
    outcome.text += "".join(choice.text for choice in body.choices)


def judge(
    outcome: Outcome,
    excused: Sequence[tuple[float, float]],
    spare_s: float,
    *,
    is_calm: bool = False,
) -> list[str]:
    """What is wrong with an outcome; empty: nothing. ``excused`` are the spans in which a
    broken connection to the router is nobody's fault; ``spare_s`` is how long processes
    stood still that the answer may have waited for. ``is_calm``: it ended before anything
    went wrong, so only the load can have failed it."""
    request = outcome.request
    found = [f"{outcome}: {problem}" for problem in outcome.problems]
    if outcome.ended_s is None:
        return [*found, f"{outcome}: has no end"]
    took_s = outcome.ended_s - outcome.asked_s
    allowed_s = request.timeout_s + GRACE_S + SLACK_S + spare_s
    if took_s > allowed_s:
        found.append(f"{outcome}: its deadline was {allowed_s:.3f} s")
    # What came before the end is judged however it ended.
    expected = expected_text(request) if outcome.text or outcome.is_ok else ""
    if not expected.startswith(outcome.text):
        found.append(f"{outcome}: got {outcome.text!r}, expected {expected!r}")
    if outcome.code == "deadline_exceeded" and took_s < request.timeout_s:
        found.append(f"{outcome}: it had {request.timeout_s:.3f} s")
    if is_calm and outcome.code and outcome.code not in CALM_CODES:
        found.append(f"{outcome}: nothing had gone wrong yet")
    if outcome.lost:
        if not any(a <= outcome.ended_s and outcome.asked_s <= b for a, b in excused):
            found.append(f"{outcome}: the router lives")
        return found
    if outcome.has_left:
        return found
    if outcome.is_ok and expected.startswith(outcome.text) and outcome.text != expected:
        found.append(f"{outcome}: got only {outcome.text!r} of {expected!r}")
    elif outcome.status != 200 and not outcome.code:
        found.append(f"{outcome}: no reason given")
    return found


def expected_text(request: Request) -> str:
    sampling = SamplingParams(temperature=0.0 if request.seed is None else 1.0, seed=request.seed)
    tokens = simulated_tokens(MODEL, request.prompt, request.max_tokens, sampling)
    return "".join(f"{token} " for token in tokens)
