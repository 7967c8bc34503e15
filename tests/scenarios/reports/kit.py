"""What the tests of public reports share: outcomes, whole pools, a hand on the wire."""

from __future__ import annotations

from collections.abc import Callable

from pdcore.control.codec import decode_frame, encode_frames
from pdcore.control.messages import Frame, PeerMessage
from pdcore.engine.simulated import simulated_tokens
from pdcore.testing.world import World
from pdcore.types import RoomKey, SamplingParams

PROMPT = list(range(10, 30))
FIVE = SamplingParams(max_tokens=5)


def code(world: World, key: RoomKey, role: str = "decode") -> str | None:
    """The failure's code, or None for a request that ended well."""
    result = world.ranks[role].result(key)
    assert result is not None, f"{role} has no result of {key}"
    return None if result.failure is None else result.failure.code


def move_bytes(world: World) -> None:
    """Do everything the stepped fabric could do now."""
    while world.fabric.step() is not None:
        pass


def finish(world: World, key: RoomKey, role: str = "decode") -> str | None:
    """Run until the request has its result; its code."""

    def is_over() -> bool:
        move_bytes(world)
        return world.ranks[role].result(key) is not None

    world.run(is_over)
    return code(world, key, role)


def check_serves(world: World, prompt: list[int] | None = None) -> None:
    """One more request gets the right tokens: the loops and pools live."""
    prompt = prompt or PROMPT
    key = world.submit(prompt, sampling=FIVE)
    assert finish(world, key) is None
    assert world.decode.tokens(key) == simulated_tokens(world.model, prompt, 5)


def check_whole(world: World) -> None:
    """Run until nothing can touch a block; then every block and slot is free again."""

    def is_quiet() -> bool:
        move_bytes(world)
        return not any(rank.worker.core.live_keys() for rank in world.ranks.values())

    world.run(is_quiet)
    for name, rank in world.ranks.items():
        ledger = rank.worker.core.blocks.audit()["full"]
        assert ledger.free == ledger.total, f"{name}: {ledger}"
    slots = world.decode.worker.core.rooms.slots
    slots.audit()
    assert slots.available == slots.capacity


def until_posted(world: World, prompt: list[int] | None = None) -> RoomKey:
    """Submit at both legs and run until a write waits in the stepped fabric."""
    key = world.submit(prompt or PROMPT, sampling=FIVE)
    world.run(lambda: any(a.kind == "move" for a in world.fabric.pending()))
    return key


def wait(world: World, seconds: float) -> None:
    """Let so much time pass in quarters of a second, every worker looking each time."""
    for _ in range(int(seconds * 4)):
        world.clock.advance(0.25)
        world.step()


def tamper(
    world: World, role: str, change: Callable[[PeerMessage], PeerMessage | None]
) -> Callable[[], None]:
    """Let ``change`` replace, or drop (None), every message this rank sends from now on; call
    what it returns to let go."""
    channel = world.ranks[role].worker.ports.channel
    send = channel.send

    def changed(to: str, data: bytes) -> bool:
        frame = decode_frame(data)
        kept = [m for m in map(change, frame.messages) if m is not None]
        if not kept:
            return True
        again = Frame(
            frame.instance,
            frame.rank,
            frame.incarnation,
            frame.reply_to,
            frame.to_incarnation,
            kept,
        )
        return all(send(to, part) for part in encode_frames(again))

    vars(channel)["send"] = changed
    return lambda: vars(channel).pop("send")
