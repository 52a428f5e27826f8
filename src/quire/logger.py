"""Logging: one line per event, to standard error, level from QUIRE_LOGGING_LEVEL, form from QUIRE_LOG_FORMAT.

Quire configures only its own logger tree, and only if the application has not. Keys are never logged at any level;
prompts and outputs only by a server that was asked to (--enable-log-requests with --max-log-len).
"""

from __future__ import annotations

import logging
import os
import sys

from quire import envs
from quire.errors import ConfigError
from quire.log_format import FORMATS, make_formatter

_configured = False


def init_logger(name: str) -> logging.Logger:
    """The logger of a module: `logger = init_logger(__name__)`."""
    global _configured
    if not _configured:
        _configured = True
        root = logging.getLogger("quire")
        if not root.handlers and not logging.getLogger().handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(make_formatter(_format()))
            root.addHandler(handler)
            root.propagate = False
        if root.level == logging.NOTSET:
            root.setLevel(_level())
    return logging.getLogger(name)


def use_format(name: str) -> None:
    """Write lines in this form from now on, and so will child processes. An application's own handlers stay as they
    are."""
    os.environ[envs.LOG_FORMAT.name] = name
    for handler in logging.getLogger("quire").handlers:
        handler.setFormatter(make_formatter(_format()))


def child_level() -> str:
    """The level a child process should log at, as QUIRE_LOGGING_LEVEL takes it: ours, whoever set it."""
    level = logging.getLogger("quire").getEffectiveLevel()
    names = logging.getLevelNamesMapping()
    return min(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), key=lambda name: abs(names[name] - level))


def _format() -> str:
    name = envs.LOG_FORMAT.get().lower()
    if name not in FORMATS:
        raise ConfigError(f"{envs.LOG_FORMAT.name}={name!r} is no form of the log; {envs.LOG_FORMAT.help}")
    return name


def _level() -> str:
    level = envs.LOGGING_LEVEL.get().upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"{envs.LOGGING_LEVEL.name}={level!r} is no log level; {envs.LOGGING_LEVEL.help}")
    return level
