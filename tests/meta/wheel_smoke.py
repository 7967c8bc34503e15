"""Run by `nox -s wheel` in an environment that has the wheel and its base dependencies only.

Every module must import there. A module may need an optional dependency, but only one that an
extra of pyproject.toml installs, and then the ImportError must name it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import pkgutil
import sys
import sysconfig
from pathlib import Path

import pdcore

OPTIONAL = {"torch", "torch_npu", "tokenizers", "jinja2", "hypothesis", "transformers"}
HEAVY = {"torch", "zmq", "starlette", "numpy", "msgspec", "transitions"}


def main() -> None:
    loaded = HEAVY & set(sys.modules)
    assert not loaded, f"import pdcore loaded {loaded}"
    home = Path(pdcore.__file__).parent
    assert home.is_relative_to(sysconfig.get_path("purelib")), f"not the installed copy: {home}"
    assert (importlib.resources.files(pdcore) / "py.typed").is_file(), "no py.typed in the wheel"
    assert importlib.metadata.version("pdcore") == pdcore.__version__
    names = ["pdcore", *(one.name for one in pkgutil.walk_packages([str(home)], "pdcore."))]
    needed = {name: missing for name in names if (missing := missing_for(name))}
    wrong = {name: missing for name, missing in needed.items() if missing not in OPTIONAL}
    assert not wrong, f"needed, but installed by no extra: {wrong}"
    for name in pdcore.__all__:
        module = "" if name == "__version__" else pdcore._EXPORTS[name][0]
        assert module in needed or getattr(pdcore, name) is not None, name
    print(f"pdcore {pdcore.__version__}: {len(names)} modules import, for extras: {needed}")


def missing_for(name: str) -> str:
    """The distribution a module cannot be imported without, or "" where it imports."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return (error.name or "unknown").split(".")[0]
    return ""


if __name__ == "__main__":
    main()
