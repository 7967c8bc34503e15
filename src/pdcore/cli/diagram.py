"""``pdcore diagram``: the lifecycles, generated from the state machines that run."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from pdcore.errors import ConfigError


def diagram(
    lifecycle: str | None = None, /, *, page: Annotated[bool, Parameter(negative="")] = False
) -> int:
    """Print lifecycles as Mermaid state diagrams.

    Paste the text into any Markdown that renders Mermaid. Without a name: all of them.

    Examples:

    - `pdcore diagram`
    - `pdcore diagram sender`
    - `pdcore diagram --page > lifecycle.md`

    Parameters
    ----------
    lifecycle
        sender, receiver, peer, rank, instance, ... ; all of them without a name.
    page
        The whole page: theory, diagrams, states and rows of every lifecycle.
    """
    from pdcore.config_loader import suggest
    from pdcore.fsm.diagram import LIFECYCLES, mermaid, render

    tables = {table.name: table for table, _ in LIFECYCLES}
    if page:
        print(render(), end="")
        return 0
    if lifecycle is None:
        print("\n\n".join(f"%% {name}\n{mermaid(table)}" for name, table in tables.items()))
        return 0
    if lifecycle not in tables:
        raise ConfigError(f"no lifecycle {lifecycle!r}{suggest(lifecycle, list(tables))}")
    print(mermaid(tables[lifecycle]))
    return 0
