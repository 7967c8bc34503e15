"""The open connections of a socket transport, by descriptor, and what is polled for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pdcore.transports.socket_bell import Inbox
from pdcore.transports.socket_greeting import Greeting
from pdcore.transports.socket_incoming import Incoming
from pdcore.transports.socket_links import Link, Told
from pdcore.transports.socket_poller import Poller

#: Connections of one transport; more callers than that are turned away.
MAX_LINKS: Final = 1024
#: Callers that have not been welcomed yet.
MAX_CALLERS: Final = 64
#: Words that the owner has not taken; nothing more is read from senders until it does.
MAX_TOLD: Final = 4096


class LinkTable:
    """Used by the transport's thread only. Iterating takes a copy: links may end meanwhile."""

    def __init__(self, poller: Poller, inbox: Inbox[Told]) -> None:
        self._poller = poller
        self._inbox = inbox
        self._links: dict[int, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def find(self, fd: int) -> Link | None:
        return self._links.get(fd)

    def has_room(self) -> bool:
        """For one more caller."""
        callers = sum(isinstance(link.half, Greeting) for link in self._links.values())
        return callers < MAX_CALLERS and len(self._links) < MAX_LINKS

    def longest_silent(self) -> Link | None:
        """The caller that came first of those who have not said who they are: whoever says
        nothing must not keep out who would."""
        for link in self._links.values():
            if isinstance(link.half, Greeting) and link.half.hello is None:
                return link
        return None

    def add(self, link: Link) -> None:
        self._links[link.sock.fileno()] = link
        self.refresh(link)

    def remove(self, link: Link) -> bool:
        """Close it; False when it was already."""
        fd = link.sock.fileno()
        if self._links.pop(fd, None) is None:
            return False
        self._poller.forget(fd)
        link.sock.close()
        link.out.clear()
        return True

    def refresh(self, link: Link) -> None:
        """Poll for what it can use now."""
        fd = link.sock.fileno()
        if fd in self._links:
            is_full = isinstance(link.half, Incoming) and len(self._inbox) >= MAX_TOLD
            read = link.may_read and not is_full
            self._poller.want(fd, read=read, write=link.wants_to_send)
