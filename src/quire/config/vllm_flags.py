"""The flags of `vllm serve` that Quire does not have.

The table is a file, `assets/vllm_flags.toml`, which is read when an argument is not one of our flags. A value that asks
for nothing is accepted. Any other value either has no effect, which is logged as a warning, or would change what the
server is, and is refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from quire.config.engine import has_xgrammar
from quire.config.model import ASSETS_DIR
from quire.errors import ConfigError
from quire.logger import init_logger

logger = init_logger(__name__)


class VllmFlag(NamedTuple):
    """One row. `name` uses underscores."""

    name: str
    group: str
    default: Any = None
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    takes_many: bool = False
    """True: several values may follow one use."""
    short: str | None = None
    silent: tuple[Any, ...] = ()
    """Values beside the default that ask for nothing."""
    ignored: str = ""
    """Reason why the flag has no effect, if Quire can do without."""
    refused: str = ""
    """Reason why the flag is refused: without it the server would not be what was asked for."""

    @property
    def option(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    def asks_nothing(self, value: Any) -> bool:
        """Returns whether the value has the same effect as leaving the flag out."""
        values = value if isinstance(value, list) and self.takes_many else [value]
        read = [_read(v) for v in values]
        nothing = (None, {}, [], "", self.default, *self.silent, *([False] if self.default is None else []))
        return all(any(v == n and type(v) is type(n) for n in nothing) for v in read) or read == self.default


def _read(value: Any) -> Any:
    """Returns the value that a flag's text stands for, as far as comparisons need it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None if value == "None" else value


@cache
def vllm_flags() -> dict[str, VllmFlag]:
    """Returns every flag, by name."""
    table = tomllib.loads((ASSETS_DIR / "vllm_flags.toml").read_text(encoding="utf-8"))
    return {
        name: VllmFlag(
            name,
            group,
            row.get("default"),
            tuple(row.get("choices", ())),
            row.get("switch", False),
            row.get("many", False),
            row.get("short"),
            tuple(row.get("silent", ())),
            row.get("ignored", ""),
            row.get("refused", ""),
        )
        for group, rows in table.items()
        for name, row in ((key.replace("-", "_"), row) for key, row in rows.items())
    }


def settle_vllm_flags(given: Mapping[str, Any], *, as_keywords: bool = False) -> dict[str, Any]:
    """Returns the values of Quire's flags that follow from the given flags of vLLM's. Warns of flags without effect.

    Raises ConfigError for a flag that asks for something that Quire cannot do.
    """
    ours: dict[str, Any] = {}
    for name, value in given.items():
        flag = vllm_flags()[name]
        if flag.asks_nothing(value):
            continue
        if name in _READERS:
            ours.update(_READERS[name](value))
        elif flag.refused:
            shown = "" if flag.is_switch else f" {value}"
            wish = f"{name}={value!r}"[:80] if as_keywords else f"{flag.option}{shown[:80]}"
            raise ConfigError(f"{wish} is not supported: {flag.refused}")
        else:
            logger.warning("%s has no effect: %s", name if as_keywords else flag.option, flag.ignored)
    return ours


GRAMMAR_BACKENDS = {
    "auto": "auto",
    "guidance": "guidance",
    "xgrammar": "xgrammar",
    "outlines": "auto",
    "lm-format-enforcer": "auto",
}
"""Our name for each of vLLM's names of grammar libraries."""


def _grammar_backend(value: Any) -> dict[str, Any]:
    backend = str(value).partition(":")[0]
    if backend not in GRAMMAR_BACKENDS:
        raise ConfigError(f"grammar backend {backend!r} is not one of {', '.join(GRAMMAR_BACKENDS)}")
    ours = GRAMMAR_BACKENDS[backend]
    if ours == "xgrammar" and not has_xgrammar():
        ours = "auto"
    if ours != backend:
        logger.warning("grammar backend %s is not supported or not installed; %s is used", backend, ours)
    return {"grammar_backend": ours}


def _structured_outputs_config(value: Any) -> dict[str, Any]:
    settings = _read(value)
    if not isinstance(settings, dict):
        raise ConfigError(f"--structured-outputs-config {str(value)[:80]!r} is not a JSON object")
    ours: dict[str, Any] = {}
    for key, setting in settings.items():
        if key == "backend":
            ours.update(_grammar_backend(setting))
        elif key == "reasoning_parser":
            ours["reasoning_parser"] = setting
        elif setting:
            logger.warning("--structured-outputs-config: %s has no effect; requests may set it", key)
    return ours


_TASKS: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
}


def _task(value: Any) -> dict[str, Any]:
    if value not in _TASKS:
        raise ConfigError(f"task {value!r} is not one of {', '.join(_TASKS)}; --runner says what a model is for")
    logger.warning("--task is an older flag; --task %s is read as %s", value, dict(_TASKS[value]))
    return dict(_TASKS[value])


def _pooler_config(value: Any) -> dict[str, Any]:
    logger.warning("--override-pooler-config is the older name of --pooler-config")
    return {"pooler_config": _read(value)}


def _renamed(old: str, name: str, value: Any) -> dict[str, Any]:
    logger.warning("--%s is the older name of --%s", old, name.replace("_", "-"))
    return {name: value}


_READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "task": _task,
    "override_pooler_config": _pooler_config,
    "structured_outputs_config": _structured_outputs_config,
    "guided_decoding_backend": _grammar_backend,
    "num_speculative_tokens": lambda value: _renamed("num-speculative-tokens", "spec_tokens", _read(value)),
    "speculative_model": lambda value: _renamed("speculative-model", "spec_model", value),
}
