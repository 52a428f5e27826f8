"""Logging: one line per event, to standard error, level from QUIRE_LOGGING_LEVEL, form from QUIRE_LOG_FORMAT.

Quire configures only its own logger tree, and only if the application has not. Keys are never logged at any level;
prompts and outputs only by a server that was asked to (--enable-log-requests with --max-log-len).

A record may carry named values (`logger.info(..., extra={"request_id": ...})`); the JSON form shows those in FACTS.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any

from quire import envs
from quire.errors import ConfigError

TEXT_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
FORMATS = ("text", "json")
FACTS = ("request_id", "method", "path", "status", "duration_ms")

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if code != 9} | {
    10: "\\n",
    13: "\\r",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{4,}"), r"\1 ***"),
    (
        re.compile(
            r"""(?i)\b((?:x-)?api[_-]?key|authorization|password|passwd|secret|hf_token|access_token)"""
            r"""(["']?\s*[=:]\s*["']?)(?!\s|(?:bearer|basic)\s)[^\s"',;}&]+"""
        ),
        r"\1\2***",
    ),
    (re.compile(r"\b(sk|hf)[-_][A-Za-z0-9_-]{16,}"), r"\1-***"),
    (re.compile(r"(\w+://)[^\s/@:]+:[^\s/@]+@"), r"\1***@"),
)


def redact(text: str) -> str:
    """Returns `text` without anything that looks like a key, a password or a token."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class TextFormatter(logging.Formatter):
    """One line, and the traceback of an exception under it."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT, datefmt="%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  its name in logging
        """Returns the line; text in the message cannot begin another line."""
        record.message = redact(record.message).translate(_CONTROL)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return redact(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redact(record.getMessage()),
            "pid": os.getpid(),
        }
        line |= {name: getattr(record, name) for name in FACTS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def make_formatter(name: str) -> logging.Formatter:
    """Returns the formatter for a value of QUIRE_LOG_FORMAT."""
    return JsonFormatter() if name == "json" else TextFormatter()


_configured = False


def init_logger(name: str) -> logging.Logger:
    """Returns the logger of a module: `logger = init_logger(__name__)`."""
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
    """Writes lines in this form from now on, in child processes, too. An application's own handlers are not changed."""
    os.environ[envs.LOG_FORMAT.name] = name
    for handler in logging.getLogger("quire").handlers:
        handler.setFormatter(make_formatter(_format()))


def child_level() -> str:
    """Returns the level of this process' logger, as a value of QUIRE_LOGGING_LEVEL for a child process."""
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
