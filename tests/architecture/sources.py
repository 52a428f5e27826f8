"""The sources of the package, read and parsed once for all tests of this folder: nothing is executed."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.measures import Checkout

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "quire"
CHECKOUT = Checkout(ROOT)


def is_standard(name: str) -> bool:
    """Returns True if a top-level module belongs to Python itself."""
    return name.split(".")[0] in sys.stdlib_module_names
