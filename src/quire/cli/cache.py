"""`quire cache`: lists, checks and deletes what Quire keeps on disk between runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.terminal import file_bytes
from quire.errors import ConfigError
from quire.worker.packed_cache import (
    InvalidPackedFileError,
    PackedCache,
    cache_root,
    max_cache_bytes,
    open_packed_file,
)

ACTIONS = ("list", "verify", "clear")


def command_line() -> CommandLine:
    own = [Option(name="json", help="Print one JSON object instead of a table.", is_switch=True, default=False)]
    return CommandLine(
        "quire cache",
        "List, check or delete packed weights and adapters, which later starts map into memory. They may be deleted "
        "while in use.",
        own,
        Positional("action", "list (the default); verify reads every file and checks its bytes; clear deletes all."),
    )


def run(args: Arguments) -> int:
    """Prints the files, or what was done. Returns 1 if `verify` found damage."""
    action = args["action"] or "list"
    if action not in ACTIONS:
        raise ConfigError(f"unknown action {action!r}; quire cache takes one of {', '.join(ACTIONS)}")
    cache = PackedCache.default()
    caches = cache, PackedCache.of_adapters()
    if action == "clear":
        freed = sum(one.clear() for one in caches)
        print(json.dumps({"freed_bytes": freed}) if args["json"] else f"freed {file_bytes(freed)} in {cache_root()}")
        return 0
    files = [describe(path, is_verified=action == "verify") for one in caches for path in one.files()]
    figures = {"directory": str(cache_root()), "max_bytes": max_cache_bytes(), "files": files}
    print(json.dumps(figures) if args["json"] else format_cache(figures))
    return int(action == "verify" and any(file["state"] != "ok" for file in files))


def describe(path: Path, *, is_verified: bool) -> dict[str, Any]:
    """Returns the facts of a file: path, source checkpoint, size, last use and state."""
    facts: dict[str, Any] = {"path": str(path), "source": None, "bytes": 0, "used_time": None, "state": "gone"}
    try:
        status = path.stat()
        facts |= {"bytes": status.st_size, "used_time": status.st_mtime}
        file = open_packed_file(path)
    except FileNotFoundError:
        return facts
    except (OSError, ValueError, InvalidPackedFileError) as e:
        return {**facts, "state": f"not usable: {e}"}
    damaged = file.find_damage() if is_verified else None
    return {**facts, "source": file.source, "state": "ok" if damaged is None else f"damaged in {damaged}"}


def format_cache(figures: dict[str, Any]) -> str:
    """Formats the files as a table."""
    total = sum(file["bytes"] for file in figures["files"])
    limit = file_bytes(figures["max_bytes"])
    sizes = f"{file_bytes(total)} of {limit} (QUIRE_WEIGHT_CACHE_GIB)"
    lines = [f"{figures['directory']}: {len(figures['files'])} files, {sizes}"]
    for file in figures["files"]:
        used = "-" if file["used_time"] is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(file["used_time"]))
        state = "" if file["state"] == "ok" else f"  {file['state']}"
        path = "/".join(Path(file["path"]).parts[-2:])
        lines.append(f"  {path}  {file_bytes(file['bytes']):>9}  {used}  {file['source'] or '-'}{state}")
    return "\n".join(lines)
