"""The lives of an instance's groups: ranks that are started, linked and ended together.

A rank that dies leaves the others of its group in the middle of a round or of an engine step.
So they are ended with it, and all of them are started again, on links and at a meeting place
that no former life knows.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Final, NamedTuple

_NAME_BYTES: Final = 12
_SECRET_BYTES: Final = 16


class GroupLinks(NamedTuple):
    """How the ranks of one life find each other: for votes (:mod:`pdcore.control.group`; it
    holds a secret), and for the engine's sums (a file that does not exist yet)."""

    link: str
    rendezvous: str


class _Life:
    def __init__(self, links: GroupLinks, meeting: Path) -> None:
        self.links = links
        self.meeting = meeting
        self.ranks: set[int] = set()

    def clean(self) -> None:
        """Ranks that end well remove the file themselves; one that is killed leaves it."""
        with contextlib.suppress(OSError):
            self.meeting.unlink()


class GroupLives:
    """``size`` ranks make a group: neighbours, the first of them its hub."""

    def __init__(self, size: int, run_dir: Path) -> None:
        self.size = size
        self._run_dir = run_dir
        #: Group -> the life that new processes join.
        self._current: dict[int, _Life] = {}
        self._life_of: dict[int, _Life] = {}

    def join(self, rank: int) -> GroupLinks | None:
        """A process of this rank is about to start; None for one that is alone."""
        if self.size == 1:
            return None
        life = self._current.get(rank // self.size)
        if life is None or rank in life.ranks:
            name = secrets.token_hex(_NAME_BYTES)
            link = f"ipc://@pdcore-{name}#{secrets.token_hex(_SECRET_BYTES)}"
            meeting = self._run_dir / f"meeting-{name}"
            links = GroupLinks(link, meeting.as_uri())
            life = self._current[rank // self.size] = _Life(links, meeting)
        life.ranks.add(rank)
        self._life_of[rank] = life
        return life.links

    def lost(self, rank: int) -> list[int]:
        """The process of this rank is gone: the ranks that must end with it. Empty when they
        were told already: one of them went first."""
        life = self._life_of.pop(rank, None)
        group = rank // self.size
        if life is None:
            return []
        is_first = self._current.get(group) is life
        if is_first:
            del self._current[group]
        life.clean()  # also for the later ones: they may have made it anew
        return sorted(life.ranks - {rank}) if is_first else []

    def close(self) -> None:
        """No process is left."""
        for life in self._life_of.values():
            life.clean()
