"""Composition by dotted string.

Processes are put together from names such as ``"quire.engine.core:EngineCore"``, so that the import graph stays a DAG:
the frontend never imports the engine, and neither of them imports torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from quire.errors import ConfigError


def resolve(name: str) -> Any:
    """Returns the object that `name` ("package.module:attribute") names. Raises ConfigError if there is none."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r} does not name an object; write it as 'package.module:attribute'")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as e:
        if e.name is not None and not module_name.startswith(e.name):
            raise  # the module exists and a dependency of it is missing: that error is clearer
        raise ConfigError(f"there is no module {module_name!r} (named by {name!r})") from e
    except AttributeError:
        raise ConfigError(f"module {module_name!r} has no {attribute!r} (named by {name!r})") from None
