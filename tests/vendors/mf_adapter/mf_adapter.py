"""The name under which the vendor's package was first published; as ``memfabric_hybrid`` of
its first version."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parent.with_name("memfabric") / "memfabric_hybrid.py"
_spec = importlib.util.spec_from_file_location(__name__, _PATH)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules[__name__] = _module
