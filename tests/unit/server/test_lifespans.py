"""Mounted apps live as long as their host."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from pdcore.server.lifespans import run_lifespans
from tests.unit.server.kit import run


def noted(name: str, notes: list[str], *, fails: bool = False) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if fails:
            raise RuntimeError(f"{name} cannot start")
        notes.append(f"{name} up")
        try:
            yield
        finally:
            notes.append(f"{name} down")

    return Starlette(lifespan=lifespan)


async def live(host: Starlette) -> None:
    async with host.router.lifespan_context(host):
        pass


def test_they_start_in_order_and_end_in_reverse() -> None:
    notes: list[str] = []
    first, second = noted("first", notes), noted("second", notes)
    host = Starlette(
        routes=[Mount("/a", first), Mount("/b", second)], lifespan=run_lifespans(first, second)
    )
    run(live(host))
    assert notes == ["first up", "second up", "second down", "first down"]


def test_without_it_a_mounted_app_never_starts() -> None:
    """Why it exists: Starlette runs the outermost lifespan only."""
    notes: list[str] = []
    run(live(Starlette(routes=[Mount("/", noted("inner", notes))])))
    assert notes == []


def test_one_that_cannot_start_ends_those_before_it() -> None:
    notes: list[str] = []
    apps = noted("first", notes), noted("second", notes, fails=True)
    with pytest.raises(RuntimeError, match="second cannot start"):
        run(live(Starlette(lifespan=run_lifespans(*apps))))
    assert notes == ["first up", "first down"]
