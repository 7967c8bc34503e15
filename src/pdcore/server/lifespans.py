"""Lifespans of apps that are mounted: Starlette runs only the outermost one.

The router's probing and an instance's health watch live in their app's lifespan, so a host
that mounts them must run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette


def run_lifespans(
    *apps: Starlette,
) -> Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]:
    """The ``lifespan`` of a host that mounts ``apps``: they start in this order and end in
    the reverse one. Whoever has a lifespan of their own enters this one inside."""

    @contextlib.asynccontextmanager
    async def lifespan(host: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for app in apps:
                await stack.enter_async_context(app.router.lifespan_context(app))
            yield

    return lifespan
