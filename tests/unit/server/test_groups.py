"""Ranks that are started, linked and ended together."""

from __future__ import annotations

from pathlib import Path

from pdcore.server.groups import GroupLives


def test_a_rank_that_is_alone_needs_nobody(tmp_path: Path) -> None:
    lives = GroupLives(1, tmp_path)
    assert lives.join(3) is None
    assert lives.lost(3) == []


def test_the_ranks_of_one_life_share_their_links_and_no_others(tmp_path: Path) -> None:
    """R91, R92, D2: each group meets at a place of its own, so no rank has to make the groups
    of others, in whatever order."""
    lives = GroupLives(2, tmp_path)
    first, second, other = lives.join(0), lives.join(1), lives.join(2)
    assert first == second
    assert first is not None
    assert other is not None
    assert first.link != other.link
    assert first.link.startswith("ipc://@pdcore-")
    assert first.rendezvous.startswith(f"file://{tmp_path}/meeting-")
    assert list(tmp_path.iterdir()) == [], "the engine makes it"


def test_who_is_lost_takes_the_others_along_once(tmp_path: Path) -> None:
    """Each of them dies then, and is told of once more: that changes nothing."""
    lives = GroupLives(3, tmp_path)
    former = lives.join(0)
    assert former == lives.join(1) == lives.join(2)
    assert lives.lost(1) == [0, 2]
    again = lives.join(1)  # it is back before the others have ended
    assert again != former
    assert lives.lost(0) == []
    assert lives.join(0) == again
    assert lives.lost(2) == []
    assert lives.join(2) == again
    assert lives.lost(2) == [0, 1]


def test_a_rank_that_dies_while_the_new_life_starts_ends_that_one(tmp_path: Path) -> None:
    lives = GroupLives(2, tmp_path)
    for rank in range(2):
        lives.join(rank)
    assert lives.lost(0) == [1]
    lives.join(0)
    assert lives.lost(0) == []
    assert lives.lost(1) == [], "it was of the former life"
    assert lives.join(0) == lives.join(1)


def test_the_places_where_former_lives_met_are_removed(tmp_path: Path) -> None:
    """A rank that is killed leaves its file, and an instance lives for months."""
    lives = GroupLives(2, tmp_path)

    def meet() -> Path:
        links = lives.join(0)
        assert links is not None
        assert lives.join(1) == links
        place = tmp_path / links.rendezvous.rpartition("/")[2]
        place.touch()
        return place

    former = meet()
    assert lives.lost(0) == [1]
    assert list(tmp_path.iterdir()) == []
    former.touch()  # by the other rank, before it was ended
    assert lives.lost(1) == []
    assert list(tmp_path.iterdir()) == []
    now = meet()
    assert lives.lost(3) == []
    assert list(tmp_path.iterdir()) == [now]
    lives.close()
    assert list(tmp_path.iterdir()) == []
