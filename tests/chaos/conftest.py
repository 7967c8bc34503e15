"""The cluster that chaos tests share: each meets what the former left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.parts import Parts


@pytest.fixture(scope="session")
def shared() -> Iterator[list[Parts]]:
    """The cluster that all tests use, or none yet."""
    holder: list[Parts] = []
    yield holder
    for parts in holder:
        parts.close()


@pytest.fixture
def parts(shared: list[Parts], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Whole. After a test that failed the next one gets another."""
    if not shared:
        shared.append(Parts(tmp_path_factory.mktemp("parts")))
    parts = shared[0]
    parts.is_whole = False
    yield parts
    if not parts.is_whole:
        shared.clear()
        parts.close()
