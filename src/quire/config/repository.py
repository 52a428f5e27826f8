"""The door to the files of a model repository. They are a stranger's: each is looked at before it is opened.

A file is read only if it is a regular file, lies inside the repository's folder (or, in the hub's cache, inside the
repository's part of it, whose snapshots are links to blobs), and is no larger than its kind can be. A device or a pipe
under the name of a configuration would otherwise be read for ever, and a link would show another file of the machine.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError

MAX_JSON_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 512 << 20


def checked_path(directory: Path, name: str, *, source: Path | None = None) -> Path:
    """`directory/name`, which must be there. `source` is the file that names it. Raises ModelLoadError."""
    path = directory / name
    if "\\" in name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelLoadError(f"{source or directory} names the file {name!r}, which is outside the checkpoint's folder")
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError):
        needs = f"; {source.name} needs it" if source is not None else ""
        raise ModelLoadError(f"{path} is missing{needs}: download the checkpoint again") from None
    if not any(target.is_relative_to(root) for root in _allowed_roots(directory)):
        raise ModelLoadError(
            f"{path} is a link to {target}, outside the checkpoint's folder; put the file itself there"
        )
    if not stat.S_ISREG(mode):
        raise ModelLoadError(f"{path} is not a regular file")
    return path


def find_file(directory: Path, name: str, max_bytes: int) -> Path | None:
    """The same for a file that may be absent; it must not be larger than `max_bytes`. Raises ModelLoadError."""
    path = directory / name
    if not path.exists() and not path.is_symlink():
        return None
    checked_path(directory, name)
    size = path.stat().st_size
    if size > max_bytes:
        raise ModelLoadError(f"{path} has {size} bytes; no such file has more than {max_bytes}")
    return path


def read_text(directory: Path, name: str, max_bytes: int) -> str | None:
    """The text of a file; None if it is absent. Raises ModelLoadError."""
    path = find_file(directory, name, max_bytes)
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ModelLoadError(f"{path} is not UTF-8 text: {e}") from None
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read: {e.strerror}") from None


def read_object(directory: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file; None if it is absent. Raises ModelLoadError."""
    text = read_text(directory, name, MAX_JSON_BYTES)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ModelLoadError(f"{directory / name} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{directory / name} holds a {type(value).__name__}, not an object")
    return value


def _allowed_roots(directory: Path) -> list[Path]:
    """The folder, and for a hub snapshot (`models--owner--name/snapshots/revision`) the repository's cache."""
    folder = directory.resolve()
    is_snapshot = folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
    return [folder, folder.parent.parent] if is_snapshot else [folder]
