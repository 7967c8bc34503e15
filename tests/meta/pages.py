"""Tables of the hand-written pages that come from the code, between two comments.

``python -m tests.meta.pages`` writes them anew; tests/meta/test_pages.py fails while one is
stale. Whole generated pages (lifecycle, configuration) have commands of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from pdcore.errors import HTTP_STATUS
from pdcore.testing.conformance import CHECKS, cell
from pdcore.transports import registry
from pdcore.transports.base import TransportCaps
from tests.meta.source import ROOT

DOCS = ROOT / "docs"
SECTION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: What each failure code means and what to do; a code without a line here is a stale page.
FAILURES = {
    "invalid_request": "a field is wrong; the message names it",
    "not_found": "no such path",
    "model_not_found": "another model is served here; see `/v1/models`",
    "method_not_allowed": "the path exists, the method does not",
    "request_timeout": "the client did not send its body in time",
    "room_in_use": "the room has a live request; choose another, or wait",
    "prompt_too_long": "more tokens than prefill takes or the model holds",
    "body_too_large": "the body is over `max_body_bytes`",
    "cancelled": "the client left, or somebody cancelled it",
    "overloaded": "a queue is full; try again",
    "internal": "a bug in pdcore or in the engine; the worker's log has more",
    "incompatible": "prefill and decode cannot be paired; the message names both values",
    "prefill_failed": "prefill could not compute the prompt",
    "handshake_rejected": "prefill refused this decode instance's handshake",
    "bad_metadata": "what came with the KV cache does not fit the request",
    "transfer_failed": "the KV cache did not arrive",
    "corrupted": "the KV cache did not arrive as it was sent (`--integrity`)",
    "stale_route": "the prefill instance was restarted and decode had its old route; send it again",
    "bad_gateway": "the router could not use what an instance answered",
    "peer_lost": "an instance at the other end of the transfer died or cannot be reached",
    "worker_lost": "a worker of the instance that answers died with the request",
    "unreachable": "nobody answers at an address",
    "unavailable": "no instance is ready; try again",
    "out_of_memory": "no KV blocks were left, again and again",
    "shutting_down": "the instance is stopping; try again, another one will take it",
    "deadline_exceeded": "the request's own time is over; the message says in which state",
}


def rows(cells: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in cells]
    lines.insert(1, "|" + "---|" * lines[0].count(" | ") + "---|")
    return "\n".join(lines) + "\n"


def failures() -> str:
    """Every code, by its HTTP status. Raises KeyError for one without a meaning."""
    ordered = sorted(HTTP_STATUS, key=lambda code: HTTP_STATUS[code])
    body = [(HTTP_STATUS[code], f"`{code}`", FAILURES[code]) for code in ordered]
    return rows([("HTTP status", "code", "meaning"), *body])


def capabilities() -> str:
    """What each transport of pdcore declares, whether it works on this machine or not; twice
    where it declares something else between hosts."""
    declared: dict[str, dict[str, str]] = {}
    for name in registry.built_in():
        plugin = registry.load(name)
        if plugin.caps is None:
            raise RuntimeError(f"{name}: its PLUGIN declares no caps, so it has no column")
        declared[name] = cells = {k: cell(value) for k, value in attrs.asdict(plugin.caps).items()}
        elsewhere = attrs.asdict(plugin.caps_between_hosts or plugin.caps)
        for field, value in elsewhere.items():
            if cell(value) != cells[field]:
                cells[field] += f"; between hosts {cell(value)}"
    names = [field.name for field in attrs.fields(TransportCaps)]
    head = ("capability", *(f"`{name}`" for name in declared))
    return rows([head, *((name, *(cells[name] for cells in declared.values())) for name in names)])


def checks() -> str:
    """Every check of the conformance suite with the first sentence of its own text."""
    body = [(f"`{check.name}`", check.guarantee, check.summary) for check in CHECKS]
    return rows([("check", "guarantee", "what it shows"), *body])


TABLES: dict[str, Callable[[], str]] = {
    "failures": failures,
    "capabilities": capabilities,
    "checks": checks,
}


def render(text: str) -> str:
    """The page with every generated section as the code has it now. Raises KeyError for a
    section that no table is called like."""
    return SECTION.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)


def pages() -> list[Path]:
    return sorted(path for path in DOCS.rglob("*.md") if SECTION.search(path.read_text("utf-8")))


def main() -> None:
    for path in pages():
        path.write_text(render(path.read_text("utf-8")), "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
