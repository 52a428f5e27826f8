"""What a line of the log looks like: text for people, JSON for machines. None has a secret, or a line break of others.

A record may carry facts of its own (`logger.info(..., extra={"request_id": ...})`): JSON shows those named in FACTS.
"""

from __future__ import annotations

import json
import logging
import os
import re
from datetime import UTC, datetime
from typing import Any

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
    """`text` without what looks like a key, a password or a token."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class TextFormatter(logging.Formatter):
    """One line, and the traceback of an exception under it."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT, datefmt="%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  its name in logging
        """The line: what others have put into the message cannot begin another one."""
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
    """By the value of QUIRE_LOG_FORMAT."""
    return JsonFormatter() if name == "json" else TextFormatter()
