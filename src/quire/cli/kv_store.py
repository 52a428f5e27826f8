"""`quire kv-store`: lists, checks, deletes and serves what a directory of --kv-store holds."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.terminal import file_bytes
from quire.config.flags import parse_human_int
from quire.config.kv_transfer import DEFAULT_STORE_BYTES, MIN_STORE_BYTES
from quire.errors import ConfigError
from quire.failpoints import arm_failpoints
from quire.kv_store.directory import ExtentFile, StoreDirectory
from quire.kv_store.extent import find_damage, follow, open_extent, try_lock
from quire.kv_store.peer.server import BlockServer, DirectorySource
from quire.kv_store.record import RecordMac
from quire.kv_store.write_limits import MAX_WRITE_BYTES_PER_S

ACTIONS = ("list", "verify", "clear", "serve")
LISTEN = "tcp://127.0.0.1:14579"


def command_line() -> CommandLine:
    own = [
        Option(name="json", help="Print one JSON object instead of a table.", is_switch=True, default=False),
        Option(
            name="listen",
            help="Address of serve: tcp://HOST:PORT or ipc://PATH. Clients must have the directory's key, and "
            "connections beyond this machine are encrypted.",
            default=LISTEN,
            metavar="ADDRESS",
        ),
        Option(
            name="allow_writes",
            help="Let engines that serve's address is given to store their blocks in the directory, which is made if "
            "need be.",
            is_switch=True,
            default=False,
        ),
        Option(
            name="size",
            help="Most bytes that the directory may take with --allow-writes (50G); what was used longest ago goes "
            "first.",
            parse=parse_human_int,
            default=DEFAULT_STORE_BYTES,
            validate=_check_size,
        ),
        Option(
            name="max_write_bytes_per_s",
            help="Most bytes that all engines may store in a second with --allow-writes.",
            parse=parse_human_int,
            default=MAX_WRITE_BYTES_PER_S,
            validate=_check_rate,
        ),
    ]
    return CommandLine(
        "quire kv-store",
        "List, check, delete or serve the KV blocks in a directory of --kv-store. Servers may use it meanwhile.",
        own,
        Positional(
            "words",
            "An action and the directory. list: its extents; verify: reads each record and checks its tag; clear: "
            "deletes all records; serve: sends them to other engines, and with --allow-writes stores theirs, until it "
            "is interrupted.",
            nargs="*",
        ),
    )


def run(args: Arguments) -> int:
    """Prints the extents, or what was done. Returns 1 if `verify` found damage."""
    words = args["words"]
    if len(words) != 2 or words[0] not in ACTIONS:
        raise ConfigError(f"quire kv-store takes one of {', '.join(ACTIONS)} and a directory, not {' '.join(words)!r}")
    action, directory = words[0], Path(words[1]).expanduser()
    takes_records = args["allow_writes"]
    if takes_records and action != "serve":
        raise ConfigError(f"--allow-writes is an option of serve, not of {action}; leave it out")
    store = StoreDirectory.open(directory, args["size"] if takes_records else 0, is_made=takes_records)
    try:
        if action == "serve":
            _serve(store, args["listen"], args["max_write_bytes_per_s"] if takes_records else 0)
            return 0
        if action == "clear":
            freed = _clear(store)
            print(json.dumps({"freed_bytes": freed}) if args["json"] else f"freed {file_bytes(freed)} in {directory}")
            return 0
        extents = sorted(store.list_extents(), key=lambda e: -max(e.used_ns, e.written_ns))
        rows = [_describe(store, extent, is_verified=action == "verify") for extent in extents]
    except OSError as e:
        raise ConfigError(f"quire kv-store {action}: {directory}: {e.strerror or e}") from None
    finally:
        store.close()
    figures = {"directory": str(directory), "bytes": sum(row["bytes"] for row in rows), "extents": rows}
    print(json.dumps(figures) if args["json"] else format_store(figures))
    return int(any(row["damaged"] for row in rows))


def _check_size(num_bytes: int) -> None:
    if num_bytes < MIN_STORE_BYTES:
        raise ConfigError(f"--size {num_bytes} is less than {MIN_STORE_BYTES} (256 MiB); give more")


def _check_rate(num_bytes: int) -> None:
    if num_bytes < 1:
        raise ConfigError(f"--max-write-bytes-per-s {num_bytes} is less than 1; leave out --allow-writes to take none")


def _serve(store: StoreDirectory, address: str, max_write_bytes_per_s: int) -> None:
    """Serves the records until SIGINT or SIGTERM."""
    arm_failpoints()
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    server = BlockServer(DirectorySource(store, max_write_bytes_per_s), store.key, address)
    print(f"serving {store.path} at {server.address}", flush=True)
    is_over.wait()
    server.close()


def _clear(store: StoreDirectory) -> int:
    extents = store.list_extents()
    for extent in extents:
        store.remove(extent.name)
    return sum(extent.num_bytes for extent in extents)


def _describe(store: StoreDirectory, extent: ExtentFile, *, is_verified: bool) -> dict[str, Any]:
    """Returns the facts of an extent; damaged: records whose tags are wrong, counted by `verify` only. What is behind
    the last whole record of one that nothing writes counts as one of them."""
    facts: dict[str, Any] = {
        "name": extent.name,
        "namespace": extent.namespace,
        "bytes": extent.num_bytes,
        "used_time": max(extent.used_ns, extent.written_ns) / 1e9,
        "state": "gone",
        "records": 0,
        "damaged": 0,
    }
    try:
        descriptor = open_extent(store.descriptor, extent.name)
    except OSError:
        return facts
    try:
        is_left = try_lock(descriptor, fcntl.LOCK_SH)  # and no server seals it now
        table = store.load_table(extent)
        entries = list(follow(descriptor, 0, bytes.fromhex(extent.namespace))) if table is None else table.entries
        state = "sealed" if table is not None else "unsealed" if is_left else "open"
        facts |= {"state": state, "records": len(entries)}
        if is_verified:
            end = entries[-1].end if entries else 0
            mac = RecordMac(store.key)
            facts["damaged"] = sum(find_damage(descriptor, entry, mac) is not None for entry in entries)
            facts["damaged"] += state == "unsealed" and end < extent.num_bytes
    except OSError as e:
        facts["state"] = f"not readable: {e.strerror}"
    finally:
        os.close(descriptor)
    return facts


def format_store(figures: dict[str, Any]) -> str:
    """Formats the extents as a table."""
    rows = figures["extents"]
    num_records = sum(row["records"] for row in rows)
    lines = [f"{figures['directory']}: {len(rows)} extents, {num_records} blocks, {file_bytes(figures['bytes'])}"]
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used_time"]))
        damage = f"  {row['damaged']} damaged" if row["damaged"] else ""
        size = file_bytes(row["bytes"])
        lines.append(f"  {row['name']:<36} {size:>10} {row['records']:>7} blocks  {used}  {row['state']}{damage}")
    return "\n".join(lines)
