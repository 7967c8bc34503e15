"""The links within one life of a simulated group: ordered, and nothing is lost while both live.

What :mod:`pdcore.control.group` is between real processes.
"""

from __future__ import annotations

from typing import Protocol

from pdcore.sim.loop import Process
from pdcore.sim.site import Site


class Member(Protocol):
    """A rank, as its group knows it."""

    process: Process

    def wake(self) -> None: ...


class GroupLinks:
    """Of one life: a group is started, and ended, whole."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.members: list[Member] = []
        self.inboxes: dict[int, list[tuple[int, bytes]]] = {}
        self._due_s: dict[tuple[int, int], float] = {}

    def port(self, index: int) -> SimGroupPort:
        self.inboxes[index] = []
        return SimGroupPort(self, index)

    def carry(self, sender: int, to: int, data: bytes) -> None:
        """It arrives in the other process, when that runs."""
        member, inbox = self.members[to], self.inboxes[to]

        def arrive() -> None:
            inbox.append((sender, data))
            member.wake()

        loop = self.site.loop
        due_s = max(loop.time() + self.site.link_delay_s(), self._due_s.get((sender, to), 0.0))
        self._due_s[sender, to] = due_s
        loop.call_at(due_s, arrive, context=member.process.context)


class SimGroupPort:
    """One rank's end."""

    def __init__(self, links: GroupLinks, index: int) -> None:
        self._links = links
        self._index = index

    def send(self, rank: int, data: bytes) -> None:
        self._links.carry(self._index, rank, data)

    def receive(self) -> list[tuple[int, bytes]]:
        inbox = self._links.inboxes[self._index]
        taken = inbox[:]
        inbox.clear()
        return taken

    def close(self) -> None:
        """What was said may still arrive."""
