"""The version: where everything that may not import the package's face finds it."""

from __future__ import annotations

__version__ = "0.1.0"
