"""The file behind --config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def read_config_file(path: Path) -> dict[Any, Any]:
    """The map of flags to values in YAML file `path`. Raises ConfigError naming the file."""
    import yaml  # a third-party import of 0.04 s that few command lines need

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"--config {path}: {e.strerror or e}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(e).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds a {type(content).__name__}, not a map of flags to values")
    return content
