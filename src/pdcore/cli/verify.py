"""``pdcore verify``: the proofs that come with the product, for anybody to run."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from cyclopts import App

HELP: Final = """\
Check pdcore's promises on this machine: no failure loses a request, corrupts a block or hangs.

- `pdcore verify lifecycles` walks every reachable state of small worlds built from the code
  that runs in production, and checks each of them. Some minutes.
- `pdcore verify cluster --seeds 100` runs whole clusters on virtual time while processes die,
  networks part and memory runs out. Less than a second for each seed.
- `pdcore verify transport --all` asks of every KV transport what it promises, on this machine.
  Some ten seconds for each.

Example: `pdcore verify lifecycles --list` names the small worlds.

docs/verification.md says what is proved, within which bounds, and what is not.
"""

#: pdcore.cli.verify_<name> has the function of that name.
PROOFS: Final = ("lifecycles", "cluster", "transport")


def build_verify() -> App:
    """The command tree below ``pdcore verify``."""
    app = App(name="verify", help=HELP, help_format="markdown", version_flags=[])
    for position, name in enumerate(PROOFS):
        module = import_module(f"pdcore.cli.verify_{name}")
        app.command(vars(module)[name], name=name, sort_key=position)
    return app


verify: Final = build_verify()
