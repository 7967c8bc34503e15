"""``python -m pdcore.cli``: the ``pdcore`` command where no script is installed."""

from __future__ import annotations

import sys

from pdcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
