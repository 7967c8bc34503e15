"""Half-open breakers: a peer that keeps failing gets no new work for a while (D25, R49).

One per process life of a peer, seen from one rank, so a pair is judged by itself: one broken
path takes no other one out (vllm PR #55471).

* closed: work as usual; ``peer_failures`` failures in a row open it, silence opens it at once;
* open: no new work until ``peer_cooldown_s`` is over;
* half-open: one room tries. Its success closes the breaker, its failure opens it again; one
  that has done neither for ``peer_cooldown_s`` (it may queue for blocks) is not waited for:
  the next one tries too.

The seed closed its breaker at any message of the peer, so that it never bit under traffic
(D25). Here a message only ends what silence began; failed transfers are forgiven for a
completed one. Nothing here frees a block or ends a request: it only decides about new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from pdcore.types import Incarnation, PeerRef, RoomKey

#: Peers with a failure on record; more than a deployment has. The oldest is forgiven.
MAX_BREAKERS: Final = 1024


class _Breaker:
    __slots__ = (
        "cause",
        "failures",
        "is_silence",
        "open_until_s",
        "peer",
        "trial",
        "trial_until_s",
    )

    def __init__(self, peer: PeerRef) -> None:
        self.peer = peer
        self.failures = 0
        self.cause = ""
        #: None: closed.
        self.open_until_s: float | None = None
        #: Opened by silence alone: the peer's next word closes it.
        self.is_silence = False
        #: The room that tries the peer.
        self.trial: RoomKey | None = None
        self.trial_until_s = 0.0

    def is_tried(self, now: float) -> bool:
        """A room is trying it; the others wait for what becomes of that."""
        return self.trial is not None and now < self.trial_until_s


class Breakers:
    """All peers of one rank. ``now`` is monotonic time (seconds)."""

    def __init__(self, max_failures: int, cooldown_s: float) -> None:
        self._max_failures = max_failures
        self._cooldown_s = cooldown_s
        self._breakers: OrderedDict[Incarnation, _Breaker] = OrderedDict()

    def __len__(self) -> int:
        return len(self._breakers)

    # --- may it get work? -----------------------------------------------------------------

    def refusal(self, incarnation: Incarnation, key: RoomKey, now: float) -> str | None:
        """Why this room may not use that peer, or None. A room that is its trial may."""
        breaker = self._breakers.get(incarnation)
        if breaker is None or breaker.open_until_s is None or breaker.trial == key:
            return None
        if now < breaker.open_until_s:
            return f"{breaker.cause}; it is tried again in {breaker.open_until_s - now:.1f} s"
        if breaker.is_tried(now):
            return f"{breaker.cause}; another request is trying it"
        return None

    def begin(self, incarnation: Incarnation, key: RoomKey, now: float) -> None:
        """This room uses the peer: where it is half-open, as its trial. Work that began
        before it opened is none."""
        breaker = self._breakers.get(incarnation)
        if breaker is None or breaker.open_until_s is None or now < breaker.open_until_s:
            return
        if not breaker.is_tried(now):
            breaker.trial, breaker.trial_until_s = key, now + self._cooldown_s

    # --- what became of it -----------------------------------------------------------------

    def failed(self, peer: PeerRef, detail: str, now: float) -> bool:
        """A transfer or a handshake with it failed. True when that opens the breaker."""
        breaker = self._breaker(peer)
        breaker.failures += 1
        is_due = breaker.open_until_s is not None and now >= breaker.open_until_s
        if not is_due and (
            breaker.failures < self._max_failures
            or (breaker.open_until_s is not None and not breaker.is_silence)
        ):
            return False
        times = f"{breaker.failures} times in a row, the last one: " if breaker.failures > 1 else ""
        self._open(breaker, f"it failed {times}{detail}", now, is_silence=False)
        return True

    def silent(self, peer: PeerRef, detail: str, now: float) -> None:
        """It has not answered for several heartbeats."""
        breaker = self._breaker(peer)
        is_silence = breaker.open_until_s is None or breaker.is_silence
        self._open(breaker, detail, now, is_silence=is_silence)

    def heard(self, incarnation: Incarnation) -> None:
        """Any message of this life: ends what silence began, and nothing else (D25)."""
        breaker = self._breakers.get(incarnation)
        if breaker is not None and breaker.is_silence:
            breaker.open_until_s, breaker.is_silence, breaker.trial = None, False, None
            if not breaker.failures:
                del self._breakers[incarnation]

    def succeeded(self, incarnation: Incarnation) -> None:
        """KV went from one to the other: closed, everything is forgiven."""
        self._breakers.pop(incarnation, None)

    def ended(self, key: RoomKey) -> None:
        """A room has its result. A trial that proved nothing leaves its place to the next."""
        for breaker in self._breakers.values():
            if breaker.trial == key:
                breaker.trial = None

    def forget(self, incarnation: Incarnation) -> None:
        """That process life is over."""
        self._breakers.pop(incarnation, None)

    def problems(self, now: float) -> list[tuple[PeerRef, str]]:
        """Who gets no new work now, and why. Not one whose cool-down is over: it must be
        given a request to be tried."""
        return [
            (breaker.peer, breaker.cause)
            for breaker in self._breakers.values()
            if breaker.open_until_s is not None
            and (now < breaker.open_until_s or breaker.is_tried(now))
        ]

    # --- inside ----------------------------------------------------------------------------

    def _breaker(self, peer: PeerRef) -> _Breaker:
        breaker = self._breakers.get(peer.incarnation)
        if breaker is None:
            breaker = self._breakers[peer.incarnation] = _Breaker(peer)
            while len(self._breakers) > MAX_BREAKERS:
                self._breakers.popitem(last=False)
        self._breakers.move_to_end(peer.incarnation)
        return breaker

    def _open(self, breaker: _Breaker, cause: str, now: float, *, is_silence: bool) -> None:
        breaker.cause = cause
        breaker.open_until_s = now + self._cooldown_s
        breaker.is_silence = is_silence
        breaker.trial = None

    def __repr__(self) -> str:
        open_now = [b.peer.instance for b in self._breakers.values() if b.open_until_s is not None]
        return f"Breakers(known={len(self._breakers)}, open={open_now})"
