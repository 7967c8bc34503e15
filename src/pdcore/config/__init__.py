"""The configuration schema: every constant of pdcore, once, with its unit and its reason.

Layer 1: no I/O, no environment (:mod:`pdcore.config_loader` reads files and variables).
pdcore's own defaults serve the embedded model without any configuration; the seed's
values, where they differ, stand beside them and live in ``examples/configs`` (D44,
R13-R19). ``docs/configuration.md`` is generated from these classes, so it cannot drift
(D61).
"""

from __future__ import annotations

from pdcore.config.limits import DEFAULT_LIMITS, CoreLimits

__all__ = ["DEFAULT_LIMITS", "CoreLimits"]
