"""How the connections of a socket transport end, and what an end means.

The end of a connection ends its transfers, but says little about the peer:

- a BYE on the last connection of a life, a pidfd, or an answer of its host (socket_probe)
  says that it is over (PeerDied);
- the end of the stream, read by us, says that the *receiver* reads nothing more of it: its
  transfers are quiesced. So does an error within one network namespace, whose kernel knows;
- any other error (a time-out, a reset by something on the way) leaves open whether bytes
  that are on their way still land. What was begun is then a debt (socket_debts).
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
from collections import OrderedDict
from typing import Final

from pdcore.errors import TransportError
from pdcore.transports.base import PeerDied
from pdcore.transports.socket_address import Origin, reachable
from pdcore.transports.socket_bell import Inbox
from pdcore.transports.socket_debts import Debts
from pdcore.transports.socket_greeting import Identity
from pdcore.transports.socket_incoming import Incoming
from pdcore.transports.socket_links import Link, Told
from pdcore.transports.socket_outgoing import Outgoing
from pdcore.transports.socket_poller import Poller
from pdcore.transports.socket_probe import Probes
from pdcore.transports.socket_table import LinkTable
from pdcore.transports.socket_witness import Witness
from pdcore.types import Incarnation

#: Lives that are over are remembered, so many of them.
_MAX_OVER: Final = 4096


class LinkEnd(enum.Enum):
    """What ended a connection."""

    #: The peer said that this was its last word.
    WORD = "word"
    #: The peer has closed it, and we have read everything it said.
    STREAM = "stream"
    #: An error that the kernel reports.
    ERROR = "error"
    #: We close it; the peer may still read what is on its way.
    OURS = "ours"


class Book:
    """Used by the transport's thread only."""

    def __init__(self, me: Identity, here: Origin, poller: Poller, inbox: Inbox[Told]) -> None:
        self.links = LinkTable(poller, inbox)
        self.debts = Debts(inbox.put)
        self.probes = Probes(me, poller, self.bury)
        self._here = here
        self._poller = poller
        self._inbox = inbox
        self._witness = Witness()
        #: Lives that said BYE on one of their connections.
        self._leaving: set[Incarnation] = set()
        #: Lives that are over, the oldest first.
        self._over: OrderedDict[Incarnation, None] = OrderedDict()

    def is_over(self, incarnation: Incarnation) -> bool:
        """It was called dead: whatever turns out, nothing of it is let in any more."""
        return incarnation in self._over

    def tell(self, *told: Told) -> None:
        self._inbox.put(*told)

    def watch(self, link: Link, pidfd: int) -> None:
        """Be told of the death of its process; -1: it cannot be seen from here."""
        if pidfd >= 0 and link.home is not None:
            new = self._witness.watch(link.home.origin.process, link.incarnation, pidfd)
            if new is not None:
                self._poller.want(new, read=True, write=False)

    def give_up(self, link: Link, why: str, *, fenced: bool) -> None:
        """No session may use it any more; its transfers end. The connection stays."""
        link.is_open = False
        if isinstance(link.half, Outgoing):
            ended = link.half.give_up(why, fenced=fenced)
            link.owed += [one for one in ended if not one.quiesced]
            self.tell(*ended)

    def mute(self, link: Link) -> None:
        """Send nothing more, and read on: what the peer said before it closed still counts,
        and only the end of its stream says that it reads nothing more of ours."""
        link.is_mute = True
        link.out.clear()
        with contextlib.suppress(OSError):
            link.sock.shutdown(socket.SHUT_WR)

    def end(self, link: Link, why: str, end: LinkEnd = LinkEnd.OURS) -> None:
        """The connection is over. Idempotent."""
        if not self.links.remove(link):
            return
        is_local = link.home is not None and self._here.shares_network_with(link.home.origin)
        fenced = end in (LinkEnd.WORD, LinkEnd.STREAM) or (end is LinkEnd.ERROR and is_local)
        self.give_up(link, why, fenced=fenced)
        if fenced:
            self.debts.pay(link.owed)
        else:
            self.debts.owe(link.incarnation, link.number, link.owed)
        self._bid_farewell(link.incarnation)
        if end in (LinkEnd.STREAM, LinkEnd.ERROR):
            self.ask_after(link)

    def ask_after(self, link: Link) -> None:
        """Its connection is of no use any more, and it has not said why: does it live?"""
        home, incarnation = link.home, link.incarnation
        is_known = incarnation in self._over or incarnation in self._leaving
        is_our_doing = isinstance(link.half, Outgoing) and link.half.is_over
        if home is None or is_known or is_our_doing or self._here.sees_process_of(home.origin):
            return
        with contextlib.suppress(TransportError):
            self.probes.start(incarnation, reachable(home, self._here)[0])

    def said_bye(self, link: Link) -> None:
        self._leaving.add(link.incarnation)
        self.end(link, "the peer closed its transport", LinkEnd.WORD)

    def supersede(
        self, incarnation: Incarnation, oldest: int, half: type[Incoming] | type[Outgoing]
    ) -> None:
        """Of our conversations with that life in which we are that half, those below
        ``oldest`` are over: the sender says so before a newer one is welcomed (Incoming),
        and the receiver has dropped them when it was (Outgoing)."""
        end = LinkEnd.OURS if half is Incoming else LinkEnd.WORD
        for link in self.links:
            is_meant = isinstance(link.half, half) and link.incarnation == incarnation
            if is_meant and link.number < oldest:
                self.end(link, "superseded by a newer session", end)

    def died(self, pidfd: int) -> bool:
        """A watched process is dead: nothing of it is placed any more, not even what it had
        sent. False when ``pidfd`` is not one. What was ready may have been another descriptor
        of that number, closed since: so it is looked at once more."""
        if not self._witness.is_watched(pidfd):
            return False
        if not _is_readable(pidfd):
            return True
        self._poller.forget(pidfd)
        for incarnation in self._witness.bury(pidfd):
            self.bury(incarnation, "its process is dead")
        return True

    def bury(self, incarnation: Incarnation, why: str) -> None:
        """That life is over, by proof. Idempotent."""
        self._leaving.discard(incarnation)
        if incarnation in self._over:
            return
        self._over[incarnation] = None
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)
        self.probes.stop(incarnation)
        for link in self.links:
            if link.incarnation == incarnation:
                self.end(link, why, LinkEnd.WORD)
        self.debts.settle(incarnation, None)
        self.tell(PeerDied(incarnation, fenced=True, detail=why))

    def close(self) -> None:
        """Close what is left, without a word."""
        for link in self.links:
            self.end(link, "closed")
        self.probes.close()
        self._witness.close()

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors."""
        for link in self.links:
            link.sock.close()
        self.probes.abandon()
        self._witness.close()

    def _bid_farewell(self, incarnation: Incarnation) -> None:
        """A life that said BYE is over with its last connection."""
        if incarnation not in self._leaving:
            return
        if any(link.incarnation == incarnation for link in self.links):
            return
        for pidfd in self._witness.forget(incarnation):
            self._poller.forget(pidfd)
            os.close(pidfd)
        self.bury(incarnation, "it closed its transport")


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
