"""Logging: one line per event, to standard error, level from QUIRE_LOGGING_LEVEL.

Quire configures only its own logger tree, and only if the application has not. Prompts, outputs and keys are never
logged at any level.
"""

from __future__ import annotations

import logging
import sys

from quire import envs
from quire.errors import ConfigError

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_configured = False


def init_logger(name: str) -> logging.Logger:
    """The logger of a module: `logger = init_logger(__name__)`."""
    global _configured
    if not _configured:
        _configured = True
        root = logging.getLogger("quire")
        if not root.handlers and not logging.getLogger().handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
            root.addHandler(handler)
            root.propagate = False
        if root.level == logging.NOTSET:
            root.setLevel(_level())
    return logging.getLogger(name)


def child_level() -> str:
    """The level a child process should log at, as QUIRE_LOGGING_LEVEL takes it: ours, whoever set it."""
    level = logging.getLogger("quire").getEffectiveLevel()
    names = logging.getLevelNamesMapping()
    return min(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), key=lambda name: abs(names[name] - level))


def _level() -> str:
    level = envs.LOGGING_LEVEL.get().upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"{envs.LOGGING_LEVEL.name}={level!r} is no log level; {envs.LOGGING_LEVEL.help}")
    return level
