"""The version, for modules that may not import the package's face."""

from __future__ import annotations

__version__ = "0.1.0"
