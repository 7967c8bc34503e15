"""One leg of a dispatch, from HTTP request to answer, against the ASGI app itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import pytest
import tokenizers
from starlette.applications import Starlette

from pdcore.control.messages import Abort, Aborted, Submit
from pdcore.engine.tokenizer import Tokenizer as BpeTokenizer
from pdcore.engine.tokenizer import byte_symbols
from pdcore.errors import failure
from pdcore.server import http
from pdcore.server import leg as leg_module
from pdcore.server.dispatcher import DispatcherLimits
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.openai import SamplingDefaults
from pdcore.server.text import Tokenizer
from pdcore.types import Role, RoomKey
from tests.unit.server.kit import TEXT, ByteTokenizer, Call, Reply, World, call, ready, run, settle

KEY = RoomKey(5, 7)
PD: dict[str, Any] = {
    "bootstrap_room": 5,
    "attempt": 7,
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 18800,
}
HI: dict[str, Any] = {"prompt": "hi", **PD}
PATHS = {
    "/generate": HI,
    "/v1/completions": HI,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **PD},
}


def app_of(world: World, role: Role = Role.DECODE, **options: Any) -> Starlette:
    leg = LegOptions(role=role, instance="127.0.0.1:8100", **options)
    return create_instance_app(InstanceOptions(leg), TEXT, world.dispatcher, clock=world.clock)


async def begin(world: World, app: Starlette, path: str = "/v1/completions", **more: Any) -> Call:
    """A call whose request has reached the worker."""
    one = Call(app, "POST", path, {**PATHS[path], **more})
    while not world.link.of(Submit) and not one.task.done():
        await asyncio.sleep(0)
    return one


# --- R35: what a leg must be given ---------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("missing", sorted(PD))
def test_each_missing_field_is_named(role: Role, missing: str) -> None:
    """R35, SGLang PR8063, and a decode instance that is called directly says where to go."""

    async def play() -> None:
        world = World()
        body = {name: value for name, value in HI.items() if name != missing}
        reply = await call(app_of(world, role), "POST", "/generate", body)
        assert reply.status == 400
        error = reply.json()["error"]
        assert error["param"] == missing
        assert "send the request to the router" in error["message"]
        assert world.link.of(Submit) == []

    run(play())


# --- a refusal is an end --------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (400, {"temperature": "hot"}),
        (400, {"messages": []}),
        (404, {"model": "another"}),
        (413, {"prompt": [1] * 97}),
        (504, {"remaining_s": 0.0}),
    ],
)
def test_what_was_refused_is_known_to_a_cancel(
    role: Role, status: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11, Q5 RES: the router asks until the leg knows of the dispatch, and for one that was
    refused before it had a worker that was for ever."""

    async def check() -> None:
        world = World()
        app = app_of(world, role)
        for attempt in range(1, 21):
            body = {**HI, "attempt": attempt, **fields}
            assert (await call(app, "POST", "/generate", body)).status == status
        for attempt in range(1, 21):
            reply = await call(app, "POST", "/cancel", {"room": 5, "attempt": attempt})
            assert reply.json() == {"known": True, "applied": False}, "it is asked again"
        assert world.link.of(Submit) == []

    run(check())
    monkeypatch.setattr(leg_module, "read_key", lambda body: None)
    with pytest.raises(AssertionError, match="asked again"):
        run(check())


# --- prefill: 202 at admission --------------------------------------------------------------


async def prefill_answers_at_admission(world: World, app: Starlette) -> Reply:
    one = await begin(world, app, "/generate")
    world.accept(KEY)
    await settle()
    if not one.task.done():
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
    assert one.reply.is_complete, "prefill withheld its answer"
    return one.reply


def test_prefill_answers_at_admission_not_at_the_end() -> None:
    """D10: the seed answers when the transfer has ended; the router could not tell a rejection."""

    class Late(World):
        """Mutant: acceptance is not reported."""

        def accept(self, key: RoomKey, rank: int = 0) -> None:
            pass

    async def play() -> None:
        world = World()
        reply = await prefill_answers_at_admission(world, app_of(world, Role.PREFILL))
        assert reply.status == 202
        assert reply.json() == {
            "request_id": "gen-0000000000000007",
            "bootstrap_room": 5,
            "accepted": True,
        }
        assert world.dispatcher.num_pending == 1
        late = Late()
        with pytest.raises(AssertionError, match="withheld"):
            await prefill_answers_at_admission(late, app_of(late, Role.PREFILL))

    run(play())


def test_a_prefill_rejection_is_its_answer() -> None:
    """D11: a prompt that only prefill finds too long has its status, and D10 its answer."""

    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world, Role.PREFILL), "/generate")
        world.finish(KEY, "error", failure("prompt_too_long", "97 tokens, the limit is 96"))
        reply = await one.done()
        assert reply.status == 413
        assert reply.json()["error"]["code"] == "prompt_too_long"

    run(play())


def test_a_broken_connection_to_prefill_changes_nothing() -> None:
    """Q5 UNK: decode decides."""

    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world, Role.PREFILL), "/generate")
        one.leave()
        await settle()
        assert world.link.of(Abort) == []
        world.accept(KEY)
        assert (await one.done()).status == 202

    run(play())


def test_a_decode_leg_says_when_nobody_named_a_dp_rank_and_takes_any_of_its_own() -> None:
    """R60, D21: which it is depends on prefill's dp_size, which its worker gets with the route;
    decode's own ranks share the requests by load, whatever prefill's does."""

    async def play() -> None:
        world = World(num_workers=2, dp_size=2)
        app = app_of(world, Role.DECODE)
        named = {**HI, "bootstrap_room": 6, "disagg_prefill_dp_rank": 5}
        calls = [Call(app, "POST", "/generate", {**HI, "bootstrap_room": 8})]
        calls.append(Call(app, "POST", "/generate", named))
        await settle()
        assert [rank for rank, _ in world.link.sent] == [0, 1]
        assert [m.prefill_dp_rank for m in world.link.of(Submit)] == [None, 5]
        for one in calls:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in calls), return_exceptions=True)

    run(play())


def test_the_dp_rank_that_the_router_chose_is_used_and_else_the_rooms() -> None:
    """D21."""

    async def play() -> None:
        world = World(num_workers=3, dp_size=3)
        app = app_of(world, Role.PREFILL)
        first = Call(app, "POST", "/generate", {**HI, "disagg_prefill_dp_rank": 1})
        second = Call(app, "POST", "/generate", {**HI, "bootstrap_room": 8})
        await settle()
        assert [rank for rank, _ in world.link.sent] == [1, 8 % 3]
        assert [m.prefill_dp_rank for m in world.link.of(Submit)] == [1, 8 % 3]
        for one in (first, second):
            one.task.cancel()
        await asyncio.gather(first.task, second.task, return_exceptions=True)
        wrong = await call(
            app, "POST", "/generate", {**HI, "bootstrap_room": 6, "disagg_prefill_dp_rank": 3}
        )
        assert (wrong.status, wrong.json()["error"]["param"]) == (400, "disagg_prefill_dp_rank")

    run(play())


# --- decode: never 200 without tokens --------------------------------------------------------


def check_failure_has_its_status(reply: Reply, status: int) -> None:
    assert reply.status == status
    assert "choices" not in reply.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize(
    ("code", "status"),
    [("transfer_failed", 502), ("out_of_memory", 503), ("deadline_exceeded", 504)],
)
def test_a_failure_before_the_first_token_is_an_error_status(
    path: str, stream: bool, code: str, status: int
) -> None:
    """D9: finish_reason "error" reached the seed's client as 200 with empty text."""

    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world), path, stream=stream)
        world.finish(KEY, "error", failure(code, "why"))
        reply = await one.done()
        check_failure_has_its_status(reply, status)
        assert reply.json()["error"] == {
            "message": "why",
            "type": "server_error",
            "code": code,
            "param": None,
        }
        assert ("retry-after" in reply.headers) is (status == 503)
        with pytest.raises(AssertionError):
            check_failure_has_its_status(seeds_reply("error"), status)

    run(play())


def seeds_reply(finish_reason: str) -> Reply:
    """Mutant: the seed wraps whatever the worker says in a 200 (R37)."""
    reply = Reply()
    reply.status = 200
    reply.body = b'{"choices": [{"text": "", "finish_reason": "%s"}]}' % finish_reason.encode()
    return reply


def test_a_success_without_a_token_is_a_failure() -> None:
    """D9: never 200 without tokens, whatever the worker calls it."""

    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world))
        world.finish(KEY, "stop")
        assert (await one.done()).status == 500

    run(play())


def test_a_blocking_answer_has_text_reason_and_usage() -> None:
    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world), return_token_ids=True, logprobs=True)
        world.tokens(KEY, list(b"he"), logprobs=[-0.5, -1.0])
        world.tokens(KEY, list(b"y"), logprobs=[-2.0])
        world.finish(KEY, "length")
        reply = await one.done()
        body = reply.json()
        assert (reply.status, body["choices"][0]["text"]) == (200, "hey")
        assert body["choices"][0]["token_ids"] == list(b"hey")
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -1.0, -2.0]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert body["id"] == "cmpl-0000000000000007"
        assert world.link.of(Abort) == []

    run(play())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("defaults", "asked", "is_sampled"),
    [
        (SamplingDefaults(), {}, False),
        (SamplingDefaults(temperature=0.7), {}, True),
        (SamplingDefaults(temperature=0.7), {"temperature": 0}, False),
        (SamplingDefaults(temperature=0.7, seed=3), {}, False),
        (SamplingDefaults(), {"temperature": 0.7}, True),
        (SamplingDefaults(), {"temperature": 0.7, "seed": 3}, False),
    ],
)
def test_d7_an_answer_says_that_it_was_drawn_without_a_seed(
    defaults: SamplingDefaults, asked: dict[str, Any], is_sampled: bool, stream: bool
) -> None:
    """D7: only the instance knows its defaults; the router keeps no result that is a draw."""

    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world, sampling=defaults), stream=stream, **asked)
        world.tokens(KEY, list(b"a"))
        world.finish(KEY, "stop")
        headers = (await one.done()).headers
        assert ("x-pdcore-sampled" in headers) is is_sampled

    run(play())


def test_a_failure_in_mid_answer_is_no_200() -> None:
    """D8, D9: the seed returned the partial text of a preempted request as 200."""

    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world))
        world.tokens(KEY, list(b"par"))
        await settle()
        world.finish(KEY, "error", failure("out_of_memory", "why"))
        assert (await one.done()).status == 503

    run(play())


def test_a_stream_flows_token_by_token_and_ends_with_done() -> None:
    async def play() -> None:
        world = World()
        app = app_of(world)
        one = await begin(
            world, app, "/v1/chat/completions", stream=True, stream_options={"include_usage": True}
        )
        await settle()
        assert one.reply.status == 0, "nothing is answered before the first token (D9)"
        world.tokens(KEY, list(b"a"))
        await one.until(lambda r: b'"content":"a"' in r.body)
        assert one.reply.headers["content-type"].startswith("text/event-stream")
        world.tokens(KEY, list(b"b"))
        await one.until(lambda r: b'"content":"b"' in r.body)
        world.finish(KEY, "stop")
        events = (await one.done()).events()
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 2
        assert events[-3]["choices"][0]["finish_reason"] == "stop"

    run(play())


def test_a_stream_that_fails_ends_with_an_error_event_and_without_done() -> None:
    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world), stream=True)
        world.tokens(KEY, list(b"a"))
        await one.until(lambda r: b'"text":"a"' in r.body)
        world.finish(KEY, "error", failure("worker_lost", "worker 0 is gone"))
        reply = await one.done()
        assert reply.is_complete
        assert reply.events()[-1]["error"]["code"] == "worker_lost"
        assert b"[DONE]" not in reply.body

    run(play())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_output_and_ends_the_workers_request(stream: bool) -> None:
    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world), stream=stream, stop=["END"], return_token_ids=True)
        world.tokens(KEY, list(b"one E"))
        await settle()
        world.tokens(KEY, list(b"ND two"))
        reply = await one.done()
        if stream:
            choices = [e["choices"][0] for e in reply.events()[:-1]]
            text = "".join(c["text"] for c in choices)
            ids = [i for c in choices for i in c["token_ids"]]
            reason = choices[-1]["finish_reason"]
        else:
            choice = reply.json()["choices"][0]
            text, ids, reason = choice["text"], choice["token_ids"], choice["finish_reason"]
            assert reply.json()["usage"]["completion_tokens"] == 7
        assert (text, ids, reason) == ("one ", list(b"one END"), "stop")
        assert [m.key for m in world.link.of(Abort)] == [KEY]
        assert world.dispatcher.num_pending == 0

    run(play())


# --- D47a: a client that is gone -------------------------------------------------------------


def points() -> Iterator[tuple[str, bool, int]]:
    for stream in (False, True):
        for num_tokens in (0, 1, 2):
            yield f"{'stream' if stream else 'whole'}-{num_tokens}", stream, num_tokens


async def leave_after(world: World, app: Any, stream: bool, num_tokens: int) -> None:
    one = await begin(world, app, stream=stream)
    for i in range(num_tokens):
        world.tokens(KEY, [97 + i])
        await settle()
    one.leave()
    await settle()
    assert [m.key for m in world.link.of(Abort)] == [KEY], "the worker was not told"
    await one.done()
    assert world.dispatcher.num_pending == 0
    world.dispatcher.on_message(0, Aborted(KEY, True))
    assert world.timers.armed() == 0


@pytest.mark.parametrize(("stream", "num_tokens"), [p[1:] for p in points()])
def test_a_client_that_leaves_ends_the_request_at_every_point(
    stream: bool, num_tokens: int
) -> None:
    """D47a, vllm #50425: no cancellation on disconnect; 400 clients that leave must not pile
    up."""

    def deaf(app: Starlette) -> Any:
        """Mutant: nobody listens for the disconnect (a blocking handler in the seed)."""

        async def run_app(scope: Any, receive: Any, send: Any) -> None:
            async def hears_only_the_body() -> Any:
                message = await receive()
                if message["type"] == "http.disconnect":
                    await asyncio.Event().wait()
                return message

            await app(scope, hears_only_the_body, send)

        return run_app

    async def play() -> None:
        world = World()
        await leave_after(world, app_of(world), stream, num_tokens)
        world = World()
        with pytest.raises(AssertionError, match="not told"):
            await leave_after(world, deaf(app_of(world)), stream, num_tokens)

    run(play())


def test_a_client_that_does_not_read_is_ended_when_it_leaves() -> None:
    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world), stream=True)
        one.reads.clear()
        world.tokens(KEY, list(b"a"))
        await settle()
        one.leave()
        await settle()
        assert [m.key for m in world.link.of(Abort)] == [KEY]
        one.reads.set()
        await one.done()

    run(play())


def test_a_handler_that_is_cancelled_takes_its_request_along() -> None:
    async def play() -> None:
        world = World()
        one = await begin(world, app_of(world))
        one.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one.done()
        assert [m.key for m in world.link.of(Abort)] == [KEY]

    run(play())


# --- what the instance knows of its model -----------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "other"}, 404, "model: 'other' is not served here, only 'tiny'"),
        ({"prompt": [1, 256]}, 400, "prompt: token id 256 is outside 0..255"),
        ({"prompt": [-1]}, 400, "prompt: token id -1 is outside"),
        ({"prompt": [1] * 97}, 413, "prompt has 97 tokens, more than the 96"),
        ({"prompt": "x" * 97}, 413, "prompt has 97 tokens"),
        ({"max_tokens": 200}, 400, "max_tokens: is 200, but a prompt of 2 tokens leaves 126"),
        ({"bootstrap_host": "10.0.0.1"}, 400, "bootstrap_host: 10.0.0.1:18800 is not one of"),
        ({"remaining_s": 0}, 504, "the request's time was over"),
        ({"expires_at_s": 1.0}, 504, "the request's time was over"),
    ],
)
def test_what_cannot_be_served_here_is_one_sentence(
    fields: dict[str, Any], status: int, says: str
) -> None:
    """R36, R66, D41 on decode, rule 8."""

    async def play() -> None:
        world = World()
        reply = await call(app_of(world), "POST", "/v1/completions", {**HI, **fields})
        assert reply.status == status
        assert reply.json()["error"]["message"].startswith(says)
        assert world.link.of(Submit) == []

    run(play())


def test_a_prompt_without_tokens_is_a_400() -> None:
    """D45: what the tokenizer makes of it is checked before anything is queued."""

    async def play() -> None:
        world = World()
        empty = [{"role": "user", "content": ""}]
        app = app_of(world)
        refused = await call(
            app,
            "POST",
            "/v1/chat/completions",
            {"messages": empty, "chat_template_kwargs": {"refuse": True}, **PD},
        )
        assert refused.json()["error"]["param"] == "messages"
        assert refused.status == 400

    run(play())


def test_allowed_bootstraps_are_exactly_those_configured() -> None:
    """D41: decode contacts no host on a client's word."""

    async def play() -> None:
        world = World()
        allowed = frozenset({"10.0.0.1:18800"})
        app = app_of(world, allowed_bootstraps=allowed)
        assert (await call(app, "POST", "/generate", HI)).status == 400
        again = {**HI, "attempt": 8, "bootstrap_host": "10.0.0.1"}
        one = Call(app, "POST", "/generate", again)
        await settle()
        (submit,) = world.link.of(Submit)
        assert submit.bootstrap == "10.0.0.1:18800"
        one.leave()
        await one.done()

    run(play())


def test_budget_and_expiry_of_the_router_reach_the_worker() -> None:
    async def play() -> None:
        world = World()
        expires = world.clock.unix() + 9.0
        one = await begin(
            world,
            app_of(world),
            remaining_s=8.5,
            expires_at_s=expires,
            prefill_instance="p:1",
            decode_instance="d:1",
            replaces=3,
        )
        (submit,) = world.link.of(Submit)
        assert (submit.remaining_s, submit.expires_at_s) == (8.5, expires)
        assert (submit.prefill, submit.decode, submit.replaces) == ("p:1", "d:1", 3)
        one.leave()
        await one.done()

    run(play())


class NotedTokenizer(ByteTokenizer):
    """Notes what was encoded, and in which thread."""

    def __init__(self) -> None:
        self.encoded: list[tuple[int, threading.Thread]] = []
        self.rendered: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append((len(text), threading.current_thread()))
        return super().encode(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        self.rendered.append(threading.current_thread())
        return super().render_chat(messages, **kwargs)


def large_world(max_model_len: int = 1 << 22) -> World:
    world = World()
    told = msgspec.structs.replace(
        ready(), max_model_len=max_model_len, max_prefill_tokens=max_model_len
    )
    world.dispatcher.on_message(0, told)
    return world


def app_with(world: World, tokenizer: Tokenizer) -> Starlette:
    leg = LegOptions(role=Role.DECODE, instance="127.0.0.1:8100")
    text = attrs.evolve(TEXT, tokenizer=tokenizer)
    return create_instance_app(InstanceOptions(leg), text, world.dispatcher, clock=world.clock)


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **PD}


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(path: str) -> None:
    """The 413 of a 6 MB prompt was paid for with 50 s of encoding."""

    async def play() -> None:
        tokenizer = NotedTokenizer()
        world = World()
        text = "x" * (96 * 4 + 1)
        body = {**HI, "prompt": text} if path == "/generate" else chat(text)
        reply = await call(app_with(world, tokenizer), "POST", path, body)
        assert reply.status == 413
        assert reply.json()["error"]["message"] == (
            f"prompt has {385 + (path != '/generate')} bytes; the 96 tokens that this instance "
            "takes hold at most 384"
        )
        assert tokenizer.encoded == []

    run(play())


def test_requests_that_are_being_read_or_encoded_have_a_bound_too() -> None:
    """D60: they are not in flight yet, and each may hold its whole body."""

    async def play() -> None:
        world = World(limits=DispatcherLimits(max_pending=1))
        app = app_of(world)
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        inboxes: list[asyncio.Queue[dict[str, Any]]] = [asyncio.Queue(), asyncio.Queue()]

        async def send(message: Any) -> None:
            raise AssertionError("there is nobody to answer")

        tasks = [asyncio.ensure_future(app(scope, inbox.get, send)) for inbox in inboxes]
        await settle()
        reply = await call(app, "POST", "/generate", HI)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        for inbox in inboxes:
            inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.gather(*tasks)
        one = await begin(world, app, "/generate")
        one.leave()
        await one.done()

    run(play())


def test_an_instance_that_takes_nothing_encodes_nothing() -> None:
    async def play() -> None:
        tokenizer = NotedTokenizer()
        world = World()
        world.dispatcher.on_lost(0, "killed")
        reply = await call(app_with(world, tokenizer), "POST", "/generate", HI)
        assert (reply.status, tokenizer.encoded) == (503, [])

    run(play())


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("size", [10, 5000])
def test_a_long_text_is_rendered_and_encoded_off_the_loop(path: str, size: int) -> None:
    async def play() -> None:
        tokenizer = NotedTokenizer()
        world = large_world()
        body = {**HI, "prompt": "x" * size} if path == "/generate" else chat("x" * size)
        one = Call(app_with(world, tokenizer), "POST", path, body)
        while not world.link.of(Submit) and not one.task.done():
            await asyncio.sleep(0)
        one.leave()
        await one.done()
        ((_, thread),) = tokenizer.encoded
        for used in (thread, *tokenizer.rendered):
            assert (used is threading.main_thread()) is (size == 10)

    run(play())


def test_names_in_template_kwargs_are_no_arguments_of_ours() -> None:
    """``{"self": 1}`` was a 500: it met the parameters of a method."""

    async def check(tokenizer: Tokenizer, name: str) -> None:
        world = World()
        body = {**chat("hi"), "chat_template_kwargs": {name: 1}}
        one = Call(app_with(world, tokenizer), "POST", "/v1/chat/completions", body)
        while not world.link.of(Submit) and not one.task.done():
            await asyncio.sleep(0)
        one.leave()
        try:
            reply = await one.done()
        except TypeError as error:
            raise AssertionError("a 500") from error
        assert reply.status == (400 if name == "self" else 499)

    class Mutant(ByteTokenizer):
        """Its first parameter has a name."""

        def render_chat(self, texts: Any, **kwargs: object) -> str:  # type: ignore[override]
            return ""

    run(check(ByteTokenizer(), "self"))
    run(check(ByteTokenizer(), "texts"))
    with pytest.raises(AssertionError, match="a 500"):
        run(check(Mutant(), "texts"))


class EngineTokenizer(ByteTokenizer):
    """The engine's own: byte-level BPE that merges nothing, as slow as any."""

    max_token_bytes = 1

    def __init__(self) -> None:
        symbols = byte_symbols()
        self.backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=symbols, merges=[]))
        self.backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner = BpeTokenizer(
            self.backend, eos_token_ids=(), chat_template=None, special_texts={}
        )

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)


class HoldingTokenizer(EngineTokenizer):
    """Mutant: a thread does not help where the call holds the GIL."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_the_loop_goes_on_while_a_long_text_is_encoded(path: str) -> None:
    """One prompt of a megabyte froze the instance for everybody, for seconds."""
    text = "word 12 " * (1 << 15)

    async def check(tokenizer: EngineTokenizer) -> None:
        world = large_world()
        body = {**HI, "prompt": text} if path == "/generate" else chat(text)
        one = Call(app_with(world, tokenizer), "POST", path, body)
        longest_s, start_s = 0.0, time.perf_counter()
        before_s = start_s
        while not world.link.of(Submit) and not one.task.done():
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
        one.leave()
        await one.done()
        share = longest_s / (before_s - start_s)
        assert share < 0.6, f"the loop stood still for {share:.0%} of it"

    run(check(EngineTokenizer()))
    with pytest.raises(AssertionError, match="stood still"):
        run(check(HoldingTokenizer()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_never_reads_holds_no_handler_beyond_its_time(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LAST_SEND_S", 0.001)

    async def check(app: Starlette, world: World) -> None:
        one = await begin(world, app, stream=stream, remaining_s=0.02)
        one.reads.clear()
        world.tokens(KEY, list(b"a"))
        if not stream:
            world.finish(KEY, "stop")
        done, _ = await asyncio.wait([one.task], timeout=0.5)
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
        assert done, "the handler is held for ever"
        assert world.dispatcher.num_pending == 0

    async def play() -> None:
        world = World()
        await check(app_of(world), world)
        monkeypatch.setattr(leg_module, "bounded_send", lambda send, remaining_s: send)
        world = World()
        with pytest.raises(AssertionError, match="for ever"):
            await check(app_of(world), world)

    run(play())


# --- sampling: one rule on both roles ------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_both_roles_take_and_refuse_the_same(role: Role) -> None:
    """R17, R18: prefill accepted what decode refused, and drew the first token otherwise."""

    async def play() -> None:
        most = SamplingDefaults(temperature=0.5, seed=3, max_new_tokens=100)

        def app(world: World) -> Starlette:
            return app_of(world, role, sampling=most)

        world = World()
        one = await begin(world, app(world), "/generate", max_tokens=5)
        (submit,) = world.link.of(Submit)
        asked = submit.sampling
        assert (asked.max_tokens, asked.temperature, asked.seed) == (5, 0.5, 3)
        one.task.cancel()
        for prompt, expected in (([7] * 20, 100), ([7] * 90, 38)):
            world = World()
            one = await begin(world, app(world), "/generate", prompt=prompt)
            assert world.link.of(Submit)[0].sampling.max_tokens == expected
            one.task.cancel()
        for wrong, field in (({"max_tokens": 101}, "max_tokens"), ({"min_tokens": 101}, "min_")):
            reply = await call(app(World()), "POST", "/generate", {**HI, **wrong})
            assert reply.status == 400
            assert reply.json()["error"]["param"].startswith(field)
        body = {**HI, "prompt": [7] * 90, "min_tokens": 39}
        reply = await call(app(World()), "POST", "/generate", body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, "min_tokens")

    run(play())
