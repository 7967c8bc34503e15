"""pdcore: prefill/decode disaggregation for any LLM inference server.

``import pdcore`` is cheap: names are imported when they are first used (PEP 562), so a
program that only validates a configuration never pays for torch, zmq or a web server.
To export a name, add one line to ``_EXPORTS`` and one under ``TYPE_CHECKING``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdcore import errors, types

__version__ = "0.1.0"

#: exported name -> (module, attribute); an empty attribute exports the module itself.
_EXPORTS: Final[dict[str, tuple[str, str]]] = {
    "errors": ("pdcore.errors", ""),
    "types": ("pdcore.types", ""),
}

__all__ = ["__version__", "errors", "types"]


def __getattr__(name: str) -> object:
    """Import an exported name on first use. Raises AttributeError for any other name."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pdcore' has no attribute {name!r}")
    module_name, attribute = _EXPORTS[name]
    module = import_module(module_name)
    value: object = vars(module)[attribute] if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
