"""Log capture at the loggers that matter.

For the setup, the call and the teardown of each test pytest adds two handlers to every logger that does not propagate,
after a look at all there are. torch and transformers have hundreds, of which 57 do not propagate: that took longer than
most tests. Here only the root and the loggers of LOGGERS are looked at.
"""

from __future__ import annotations

import logging
from typing import Any

from _pytest.logging import catching_logs

LOGGERS = ("quire", "transformers", "uvicorn", "uvicorn.access", "uvicorn.error")
"""Loggers whose records are captured although they do not propagate."""


def _enter(self: catching_logs[Any]) -> logging.Handler:
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    known = logging.root.manager.loggerDict
    named = [logger for name in LOGGERS if isinstance(logger := known.get(name), logging.Logger)]
    for logger in (root, *(logger for logger in named if not logger.propagate)):
        logger.addHandler(self.handler)
        self.attached_loggers.append(logger)
    return self.handler


def capture_few_loggers() -> None:
    """Replaces pytest's choice of loggers."""
    catching_logs.__enter__ = _enter
