"""Public reports on security: code in messages, memory on a stranger's word, requests that
make a server talk to anybody.

lmdeploy, FastDeploy, LightLLM, SGLang, vLLM, llm-d, cann-recipes.
"""

from __future__ import annotations

import ast
import importlib
import json
import random
import struct
import tracemalloc
from collections.abc import Callable

import pytest

from pdcore.config import DisaggConfig, RouterConfig
from pdcore.control import codec
from pdcore.control.bootstrap_client import RouteReply
from pdcore.control.zmq import ZmqChannel
from pdcore.errors import CodecError, InvalidRequest, TransportError
from pdcore.router.policies import find_bootstrap
from pdcore.server.instance import InstanceOptions, create_instance_app
from pdcore.server.leg import LegOptions
from pdcore.server.routes import RouteFetcher
from pdcore.testing.world import make_world
from pdcore.transports import descriptor
from pdcore.types import Role
from tests.meta.source import modules
from tests.scenarios.reports.fleet import FIVE, PROMPT, check_nothing_leaked
from tests.unit.server.kit import TEXT, World, call, run

#: Modules that turn bytes into objects of the sender's choice.
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
#: Methods of libraries that do the same under another name.
RUNS_CODE_CALLS = {"recv_pyobj", "send_pyobj", "unsafe_load", "load_pickle"}
#: ``exec`` of text that is written from our own tables when a module is imported.
EXEC_ALLOWED = {"pdcore.fsm.machine"}

RAN: list[str] = []


def ran(what: str) -> str:
    RAN.append(what)
    return what


class Trap:
    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return ran, ("the sender's code",)


def offences(tree: ast.AST, module: str) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in RUNS_CODE]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.split(".")[0] in RUNS_CODE else []
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in RUNS_CODE_CALLS or (name in {"exec", "eval"} and module not in EXEC_ALLOWED):
                found.append(name)
            if ast.unparse(node.func) == "torch.load":
                found.append("torch.load")
    return [f"{module}: {what}" for what in found]


def test_nothing_turns_bytes_into_code() -> None:
    """D40, lmdeploy #4804, FastDeploy #8100, LightLLM #1413, sglang #24618, sglang #21435,
    CVE-2026-3059, CVE-2026-3060, CVE-2026-3989, CVE-2025-32444: no module of the product has
    a deserialiser that can run what it reads, for peers, leaders, workers or files."""
    found = [what for module in modules() for what in offences(module.tree, module.name)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from dill import loads", "s.recv_pyobj()", "eval(x)", "torch.load(path)"],
)
def test_the_check_sees_each_way(text: str) -> None:
    assert offences(ast.parse(text), "pdcore.example")


def read_any(data: bytes) -> None:
    """Everything that reads a stranger's bytes; only typed errors come out."""
    for decode in (
        codec.decode_frame,
        codec.decode_leader_message,
        codec.decode_worker_message,
        codec.decode_endpoint,
        codec.unpack_block_ids,
        codec.unpack_token_ids,
        lambda blob: descriptor.decode(blob, "loopback"),
    ):
        try:
            decode(data)
        except (CodecError, TransportError):
            continue


def sealed(kind: int, body: bytes) -> bytes:
    """Behind a header that every reader of that kind accepts."""
    return struct.pack("<2sBBI", b"PD", codec.PROTOCOL_MAX, kind, len(body)) + body


def test_the_header_is_one_that_is_accepted() -> None:
    """Otherwise the tests below would stop at the door."""
    with pytest.raises(CodecError, match="malformed rank frame"):
        codec.decode_frame(sealed(1, b"\xdd\xff\xff\xff\xff"))


def test_a_pickle_on_any_wire_is_not_run() -> None:
    """CVE-2025-32444, lmdeploy #4804: bare, and behind every valid header."""
    pickle = importlib.import_module("pickle")
    RAN.clear()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(Trap(), protocol)
        read_any(payload)
        for kind in range(8):
            read_any(sealed(kind, payload))
        read_any(descriptor.MAGIC + payload)
    assert RAN == []
    pickle.loads(payload)
    assert RAN, "the trap works"


CLAIMS = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdb\xff\xff\xff\xff",  # text
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\x91" * 200_000,  # depth
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_nothing_is_allocated_on_a_strangers_word(claim: bytes) -> None:
    """LightLLM #1413, FastDeploy #8100: a few bytes that announce gigabytes are an error that
    costs nothing."""
    world = make_world()
    endpoint = world.decode.worker.core.setup.endpoint()
    frames = [endpoint[:8] + claim, claim]
    frames += [sealed(kind, claim) for kind in range(4)]
    tracemalloc.start()
    try:
        for frame in frames:
            read_any(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_random_and_damaged_frames_never_end_a_loop() -> None:
    """sglang #21435: noise, and real frames with flipped and missing bytes, put on the wires
    of two working ranks while a request runs; it is served, and nothing leaks."""
    world = make_world(seed=1)
    rng = random.Random(11)
    real: list[bytes] = []
    for rank in world.ranks.values():
        channel = rank.worker.ports.channel
        send = channel.send

        def keeping(to: str, frame: bytes, send=send) -> bool:
            real.append(frame)
            return send(to, frame)

        channel.send = keeping
    assert len(world.run_request(PROMPT, FIVE)) == 5
    world.settle()
    stranger = world.network.channel("stranger")
    num_before = {name: r.worker.counters.frames_garbage for name, r in world.ranks.items()}
    key = world.submit(PROMPT[::-1], sampling=FIVE)
    for number in range(3000):
        frame = bytearray(rng.choice(real) if number % 3 else rng.randbytes(rng.randrange(200)))
        for _ in range(number % 4):
            if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        if number % 5 == 0:
            del frame[rng.randrange(len(frame) + 1) :]
        stranger.send(f"mem://{('prefill', 'decode')[number % 2]}", bytes(frame))
        if number % 50 == 0:
            world.step()
    world.run(lambda: world.decode.result(key) is not None)
    assert len(world.decode.tokens(key)) == 5
    for name, rank in world.ranks.items():
        assert rank.worker.counters.frames_garbage > num_before[name] + 100
    world.settle()
    check_nothing_leaked(world)


def test_what_listens_listens_on_loopback() -> None:
    """vllm CVE-2025-32444, sglang #24618: sockets on every interface unless told otherwise."""
    assert DisaggConfig().host == DisaggConfig().local_ip == "127.0.0.1"
    assert RouterConfig(prefill_addrs=("p:1",), decode_addrs=("d:1",)).host == "127.0.0.1"
    channel = ZmqChannel()
    try:
        assert channel.address.startswith("tcp://127.0.0.1:")
    finally:
        channel.close()


# --- whom a request can make us talk to -----------------------------------------------------

HOSTS = ["169.254.169.254", "10.0.0.9", "evil.example", "[fe80::1]", "127.0.0.1@evil.example"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_client_cannot_choose_whom_decode_asks(host: str) -> None:
    """D41, llm-d sidecar, cann-recipes bootstrap_host: a bootstrap address in a request's body is
    one of the configured ones, or it is a 400 at decode and nobody is contacted."""

    async def play() -> None:
        world = World()
        leg = LegOptions(Role.DECODE, "127.0.0.1:8100")
        app = create_instance_app(InstanceOptions(leg), TEXT, world.dispatcher, clock=world.clock)
        body = {
            "prompt": "hi",
            "bootstrap_room": 5,
            "attempt": 7,
            "bootstrap_host": host,
            "bootstrap_port": 80,
        }
        reply = await call(app, "POST", "/generate", json.dumps(body).encode())
        assert reply.status == 400
        assert reply.json()["error"]["param"] == "bootstrap_host"
        assert world.link.sent == []

    run(play())


class Asked:
    def __init__(self) -> None:
        self.addresses: list[str] = []

    def fetch_route(self, address: str, etag: str = "") -> RouteReply:
        self.addresses.append(address)
        return RouteReply()


@pytest.mark.parametrize("host", HOSTS)
def test_router_and_worker_refuse_it_too(host: str) -> None:
    """llm-d sidecar, cann-recipes bootstrap_host: the router knows its own list, and the
    worker asks nobody else even if a leader told it to."""
    with pytest.raises(InvalidRequest, match="is not a configured bootstrap server"):
        find_bootstrap(host, 80, [("127.0.0.1", 18800)])
    asked = Asked()
    event = RouteFetcher(asked)(f"{host}:80")
    assert event.failure is not None
    assert event.failure.code == "invalid_request"
    assert asked.addresses == []
