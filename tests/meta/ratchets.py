"""The numbers that may only go down, and how they are counted.

``python -m tests.meta.ratchets`` prints them; ``--write`` stores them as the new pins in
ratchets.json. A pin fails when the number grew and also when it shrank, so that what was won
is kept. Raising one needs a page in docs/decisions (CONTRIBUTING.md).
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.meta.source import Module, modules

PINS = Path(__file__).with_name("ratchets.json")

#: kind of size -> its limit. A function's docstring is not counted: explaining more is
#: never punished. "attributes" are stored ones; frozen value types and config are exempt.
LIMITS: dict[str, int] = {
    "module lines": 400,
    "class lines": 250,
    "class methods": 15,
    "class attributes": 12,
    "function lines": 60,
}
COUNTED = (
    "Any",
    "cast",
    "except Exception",
    "getattr/hasattr",
    "noqa",
    "reads of the environment",
    "type: ignore",
)
#: Reading the environment is this module's work (R21).
READS_ENVIRONMENT = frozenset({"pdcore.config_loader"})
BROAD = {"Exception", "BaseException"}


def measure(source: Iterable[Module]) -> dict[str, dict[str, int]]:
    """``{"counts": {what: n}, "over <size>": {where: n}}``: what is pinned."""
    counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    over: dict[str, dict[str, int]] = {f"over {kind}": {} for kind in LIMITS}
    for module in source:
        counts.update(words(module))
        for kind, where, size in sizes(module):
            if size > LIMITS[kind]:
                over[f"over {kind}"][where] = size
    return {"counts": dict(sorted(counts.items())), **over}


def words(module: Module) -> Iterator[str]:
    """Every counted escape in one module, once per occurrence."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield from (word for word in ("type: ignore", "noqa") if word in token.string)
        elif token.type == tokenize.NAME and token.string == "Any":
            yield "Any"
    environment = set() if module.name in READS_ENVIRONMENT else {"environ", "environb", "getenv"}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and catches_all(node):
            yield "except Exception"
        elif isinstance(node, ast.Call):
            yield from call_words(node)
        elif isinstance(node, ast.Attribute) and node.attr in environment:
            yield "reads of the environment"


def catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(one, ast.Name) and one.id in BROAD for one in caught)


def call_words(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    if isinstance(call.func, ast.Name) and name in {"getattr", "hasattr"}:
        yield "getattr/hasattr"
    if name == "cast" and (isinstance(call.func, ast.Name) or is_typing(call.func)):
        yield "cast"
    if name == "suppress" and any(isinstance(a, ast.Name) and a.id in BROAD for a in call.args):
        yield "except Exception"


def is_typing(func: ast.expr) -> bool:
    return isinstance(func, ast.Attribute) and ast.unparse(func.value) in {"typing", "t"}


def sizes(module: Module) -> Iterator[tuple[str, str, int]]:
    """(kind of size, where, how large) for the module and all it defines."""
    yield "module lines", module.name, len(module.text.splitlines())
    for qualified, node in definitions(module.tree, module.name):
        if isinstance(node, ast.ClassDef):
            yield "class lines", qualified, length(node)
            methods = [child for child in node.body if isinstance(child, FUNCTION)]
            names = {method.name for method in methods if not is_overload(method)}
            yield "class methods", qualified, len(names)
            if not is_value_type(node) and not module.name.startswith("pdcore.config"):
                yield "class attributes", qualified, len(stored_attributes(node))
        else:
            yield "function lines", qualified, length(node) - docstring_lines(node)


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *FUNCTION)):
            yield f"{prefix}.{child.name}", child
            yield from definitions(child, f"{prefix}.{child.name}")
        else:
            yield from definitions(child, prefix)


def length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def is_overload(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).endswith("overload") for one in method.decorator_list)


def is_value_type(node: ast.ClassDef) -> bool:
    """Frozen attrs and dataclasses, frozen Structs, NamedTuples and enums."""
    marks = [ast.unparse(one) for one in (*node.decorator_list, *node.bases, *node.keywords)]
    return any(
        re.search(r"\bfrozen(=True|\b(?!=))|NamedTuple|Enum|IntFlag|TypedDict", mark)
        for mark in marks
    )


def stored_attributes(node: ast.ClassDef) -> set[str]:
    """Fields declared in the body, and everything that a method stores on self."""
    found = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign)
        and isinstance(child.target, ast.Name)
        and "ClassVar" not in ast.unparse(child.annotation)
        and "Final" not in ast.unparse(child.annotation)
        # Of a lifecycle (fsm.machine): the annotation of a method, nothing is stored.
        and not ast.unparse(child.annotation).startswith(("Event[", "Query["))
    }
    for method in node.body:
        if isinstance(method, FUNCTION):
            found |= {
                inner.attr
                for inner in ast.walk(method)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            }
    return found


def pins() -> dict[str, dict[str, int]]:
    loaded: dict[str, dict[str, int]] = json.loads(PINS.read_text(encoding="utf-8"))
    return loaded


def differences(now: dict[str, dict[str, int]], then: dict[str, dict[str, int]]) -> list[str]:
    """One line for every number that grew, and one for every pin that is stale."""
    lines = []
    for group in sorted({*now, *then}):
        mine, pinned = now.get(group, {}), then.get(group, {})
        for name in sorted({*mine, *pinned}):
            value, pin = mine.get(name, 0), pinned.get(name, 0)
            if value > pin:
                lines.append(f"{group}: {name} grew from {pin} to {value}")
            elif value < pin:
                lines.append(f"{group}: {name} shrank from {pin} to {value}: tighten its pin")
    return lines


def main() -> None:
    now = measure(modules())
    text = json.dumps(now, indent=2) + "\n"
    if sys.argv[1:] == ["--write"]:
        PINS.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
