"""The conformance suite outside pytest: which transports do on this machine what they promise.

The checks run in a process of their own (:func:`main`), because what they judge may be a
vendor's library: one that crashes or hangs has failed the check it was in, and the others go
on in a fresh process. What that library prints is shown only where the process died.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import IO, Final

import attrs
import msgspec

from pdcore.errors import PdcoreError
from pdcore.testing.conformance import CHECKS, Result, choose, conduct
from pdcore.testing.transport_harness import LoopbackHarness, RegistryHarness, TransportHarness
from pdcore.transports import registry
from pdcore.transports.base import Revocation, TransportCaps

#: A check that takes longer hangs: the slowest, 1,000 connections, takes some ten seconds.
CHECK_LIMIT_S: Final = 180.0
#: The least time a process gets to start and to make a transport.
START_LIMIT_S: Final = 60.0
#: Of what a process printed before it died.
TAIL_BYTES: Final = 400

#: Told before a check begins: its name, how many are done, of how many.
Tell = Callable[[str, int, int], None]


@attrs.frozen
class Verdict:
    """One transport on this machine. ``results`` is empty where it is not available; a check
    that ran on several variants is there once for each, as ``check[variant]``."""

    name: str
    reason: str | None
    remedy: str
    caps: TransportCaps | None
    results: tuple[Result, ...] = ()
    seconds: float = 0.0

    @property
    def available(self) -> bool:
        return self.reason is None

    @property
    def failed(self) -> dict[str, str]:
        """Check -> why."""
        return {r.check: r.reason for r in self.results if r.outcome == "failed"}


def verify_transport(
    name: str,
    only: Collection[str] = (),
    tell: Tell | None = None,
    limit_s: float = CHECK_LIMIT_S,
) -> Verdict:
    """Run all checks, or those in ``only``, on every variant of a transport.

    A check that takes longer than ``limit_s`` seconds, or in which the process dies, has
    failed. Raises ConfigError for an unknown transport, ValueError for an unknown check.
    """
    chosen = [check.name for check in choose(only)]
    presence = registry.presence(name)
    if presence.reason is not None:
        return Verdict(name, presence.reason, presence.remedy, presence.caps)
    started = time.monotonic()
    variants = variants_of(name)
    results: list[Result] = []
    caps = presence.caps
    for variant in variants:
        suite = _Suite(name, variant, limit_s)
        for result in suite.run(chosen, _from(tell, len(results), len(chosen) * len(variants))):
            label = f"{result.check}[{variant}]" if variant else result.check
            results.append(attrs.evolve(result, check=label))
        caps = caps or suite.caps
    return Verdict(name, None, "", caps, tuple(results), time.monotonic() - started)


def _from(tell: Tell | None, offset: int, total: int) -> Tell:
    def counted(check: str, done: int, _: int) -> None:
        if tell is not None:
            tell(check, offset + done, total)

    return counted


def variants_of(name: str) -> list[str]:
    """Names of the ways to use it; one without a name where it has no others."""
    return list(registry.load(name).all_variants())


def harness_for(name: str, variant: str) -> TransportHarness:
    """A transport as its workers use it: with the options of the variant, or of a worker."""
    plugin = registry.load(name)
    if name == "loopback":
        return LoopbackHarness(Revocation(variant or "sender_ack"), cycles=plugin.cycles)
    options = plugin.all_variants()[variant]
    harness = RegistryHarness(name, cycles=plugin.cycles)
    harness.options |= options
    return harness


@attrs.frozen
class _Told:
    """What a process says: first the capabilities of a transport that it made, to show that
    it is there, then each result."""

    caps: TransportCaps
    result: Result | None = None


class _Suite:
    """The checks of one variant, in as many processes as die under them."""

    def __init__(self, name: str, variant: str, limit_s: float) -> None:
        self.caps: TransportCaps | None = None
        self._name = name
        self._variant = variant
        self._limit_s = limit_s

    def run(self, checks: Sequence[str], tell: Tell) -> Iterator[Result]:
        left = list(checks)
        while left:
            arguments = [self._name, self._variant, *left]
            with tempfile.TemporaryFile() as said, _Child(arguments, said) as child:
                start_limit_s = max(self._limit_s, START_LIMIT_S)
                hello = child.hear(start_limit_s)
                if hello is None:
                    why = f"no transport could be made: {child.obituary(start_limit_s)}"
                    yield from (Result(check, "failed", why) for check in left)
                    return
                self.caps = hello.caps
                yield from self._listen(child, left, tell, len(checks))
                if left:
                    # The process went away in the check that it had begun.
                    why = child.obituary(self._limit_s)
                    yield Result(left.pop(0), "failed", why, child.took())

    def _listen(self, child: _Child, left: list[str], tell: Tell, total: int) -> Iterator[Result]:
        while left:
            tell(left[0], total - len(left), total)
            told = child.hear(self._limit_s)
            if told is None or told.result is None:
                return
            left.remove(told.result.check)
            yield told.result


class _Child:
    """A process that runs checks, and the pipe on which it reports each."""

    def __init__(self, arguments: Sequence[str], said: IO[bytes]) -> None:
        # The child sees the same packages, wherever this process found them.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from pdcore.testing.transport_verify import main; main()"
        )
        self._said = said
        self._reports, theirs = os.pipe()
        self._buffered = b""
        self._asked = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=(theirs,),
            # Its peers are of its group: those that it stopped end with it too.
            start_new_session=True,
        )
        os.close(theirs)

    def hear(self, limit_s: float) -> _Told | None:
        """The next report; None when none comes in time, or the process is gone."""
        self._asked = time.monotonic()
        while b"\n" not in self._buffered:
            left_s = self._asked + limit_s - time.monotonic()
            if left_s <= 0 or not select.select([self._reports], [], [], left_s)[0]:
                return None
            received = os.read(self._reports, 1 << 16)
            if not received:
                return None
            self._buffered += received
        line, _, self._buffered = self._buffered.partition(b"\n")
        return msgspec.json.decode(line, type=_Told)

    def took(self) -> float:
        return time.monotonic() - self._asked

    def obituary(self, limit_s: float) -> str:
        """Why no further report comes."""
        if self.took() >= limit_s:
            return f"did not end within {limit_s:g} s: it was killed"
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        said = self._last_words()
        return f"the process that ran it died {how}" + (f": {said}" if said else "")

    def _last_words(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TAIL_BYTES))
        return " ".join(self._said.read().decode(errors="replace").split())

    def __enter__(self) -> _Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._reports)


def main(argv: Sequence[str] | None = None) -> None:
    """``FD NAME VARIANT CHECK...``: run the checks, one line of JSON on FD after each."""
    fd, name, variant, *names = sys.argv[1:] if argv is None else argv
    by_name = {check.name: check for check in CHECKS}
    with os.fdopen(int(fd), "wb", buffering=0) as reports:
        os.set_inheritable(reports.fileno(), False)
        try:
            harness = harness_for(name, variant)
            probe = harness.create()
        except PdcoreError as error:
            sys.exit(str(error))
        caps = probe.caps
        probe.close()
        reports.write(msgspec.json.encode(_Told(caps)) + b"\n")
        for check in names:
            told = _Told(caps, conduct(by_name[check], harness, caps))
            reports.write(msgspec.json.encode(told) + b"\n")
