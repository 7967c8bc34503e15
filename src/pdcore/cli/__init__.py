"""The ``pdcore`` command. What a command needs is imported when it runs: ``--help`` is quick.

A user's mistake is one message on standard error and exit status 2, never a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cyclopts import App

#: Exit status of a mistake of the user's, as argparse has it.
EXIT_USAGE: Final = 2

HELP: Final = """\
Serve a language model with prefill and decode apart.

**First steps**

- `pdcore demo` starts a router, a prefill and a decode process on this machine and asks
  the embedded model a few things.
- `pdcore up --port 8000` keeps such a cluster in the foreground, for your own client:

      curl localhost:8000/v1/chat/completions \\
        -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hi"}]}'

- `pdcore doctor` says what works on this machine, and what to install for the rest.
- `pdcore verify lifecycles` walks every state of small worlds made of this code, and checks
  that no failure loses a request, corrupts a block or hangs.
- `pdcore serve --role prefill` (or decode, router) runs one role: one command per node.

Every setting, its default and its reason: `pdcore settings`.
"""

#: In the order of the help page: pdcore.cli.<name> has the function of that name, or an App
#: with commands of its own.
COMMANDS: Final = ("demo", "up", "serve", "doctor", "settings", "diagram", "verify")


def build_app() -> App:
    """The command tree. Importing cyclopts and rich costs a tenth of a second."""
    from cyclopts import App

    from pdcore import __version__

    app = App(
        name="pdcore",
        help=HELP,
        help_format="markdown",
        version=f"pdcore {__version__}",
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )
    for position, name in enumerate(COMMANDS):
        command = vars(import_module(f"pdcore.cli.{name}"))[name]
        if isinstance(command, App):
            command.sort_key = position
            app.command(command)
        else:
            app.command(command, name=name, sort_key=position)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    from cyclopts import CycloptsError, UnusedCliTokensError

    from pdcore.errors import PdcoreError

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status: object = build_app()(arguments)
    except CycloptsError as error:
        what = str(error)
        if isinstance(error, UnusedCliTokensError):
            what = f"nothing takes {' '.join(error.unused_tokens or ())!r}"
        return _refuse(f"{what}\nTry `pdcore {_command(arguments)}--help`.")
    except PdcoreError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `pdcore diagram | head`
        sys.stderr.close()
        return 0
    return status if isinstance(status, int) else 0


def _command(arguments: list[str]) -> str:
    """The command, and the one below it, whose help explains the mistake."""
    if not arguments or arguments[0] not in COMMANDS:
        return ""
    app = build_app()[arguments[0]]
    return " ".join((*arguments[:1], *(word for word in arguments[1:2] if word in app), ""))


def _refuse(message: str) -> int:
    print(f"pdcore: {message}", file=sys.stderr)
    return EXIT_USAGE
