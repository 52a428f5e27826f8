"""`quire fleet`: the engines of a running server: their state, a restart of one after the other, another number.

All commands speak to the server's admin listener (--enable-admin). No request is lost to any of them: requests move
from an engine before it ends.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from quire import envs
from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.errors import ClientError, ConfigError, ServerError
from quire.wire.nodes import make_fleet_key

DEFAULT_URL = "http://127.0.0.1:8001"
TIMEOUT_S = 86400.0
MODES = ("move", "wait")
_URL = Positional("url", f"URL of the server's admin listener. Default: {DEFAULT_URL}")
_KEY = Option(name="api_key", help="The server's key, if it needs one; or set QUIRE_API_KEY.", metavar="KEY")
_MODE = Option(
    name="mode",
    help="Requests of an engine that restarts: other engines go on with them, or they end first.",
    default="move",
    choices=MODES,
)
_TIMEOUT = Option(name="timeout_s", help="Longest wait for one engine.", parse=float, default=120.0, metavar="SECONDS")


def key_command_line() -> CommandLine:
    return CommandLine("quire fleet key", "Make the key that all machines of a server share (--fleet-key).", [])


def key_run(args: Arguments) -> int:
    """Prints a new key."""
    print(make_fleet_key())
    return 0


def status_command_line() -> CommandLine:
    return CommandLine("quire fleet status", "List the engines of a server.", [_KEY], _URL)


def status_run(args: Arguments) -> int:
    """Prints a row per engine. Raises ConfigError if no server answers."""
    _print(_call(args, "GET", "/admin/engines"))
    return 0


def restart_command_line() -> CommandLine:
    engine = Option(name="engine", help="The only engine to restart. Default: all.", parse=int, metavar="N")
    summary = "Restart the engines of a server, one after the other: with the weights and the code that are there now."
    return CommandLine("quire fleet restart", summary, [engine, _MODE, _TIMEOUT, _KEY], _URL)


def restart_run(args: Arguments) -> int:
    """Restarts. Raises ServerError if an engine does not come up; the others were left alone then."""
    path = "restart" if args["engine"] is None else f"{args['engine']}/restart"
    _print(_call(args, "POST", f"/admin/engines/{path}?mode={args['mode']}&timeout_s={args['timeout_s']:g}"))
    return 0


def scale_command_line() -> CommandLine:
    size = Option(name="size", help="The new number of engines.", parse=int, metavar="N")
    return CommandLine("quire fleet scale", "Change the number of engines of a server.", [size, _TIMEOUT, _KEY], _URL)


def scale_run(args: Arguments) -> int:
    """Scales. Raises ConfigError without a size."""
    if args["size"] is None:
        raise ConfigError("quire fleet scale needs the new number of engines: --size N")
    body = {"new_data_parallel_size": args["size"], "drain_timeout": max(1, round(args["timeout_s"]))}
    _call(args, "POST", "/scale_elastic_ep", body)
    _print(_call(args, "GET", "/admin/engines"))
    return 0


def _call(args: Arguments, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the answer. Raises ConfigError, ClientError or ServerError."""
    url = (args["url"] or DEFAULT_URL).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is no URL; it begins with http:// or https://")
    key = args["api_key"] or envs.API_KEY.get()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        message = _read_error(e)
        raise (ClientError if e.code < 500 else ServerError)(message) from None
    except (urllib.error.URLError, OSError, ValueError) as e:
        reason = getattr(e, "reason", e)
        raise ConfigError(f"no server answers at {url}: {reason}; give the URL of its admin listener") from None


def _read_error(error: urllib.error.HTTPError) -> str:
    if error.code == 404:
        return f"{error.url} does not exist: is it the admin listener (--enable-admin), and is there such an engine?"
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answered {error.code}"


def _print(answer: Any) -> None:
    print(f"{'engine':>6}  {'state':<10} {'requests':>8}  {'pid':>8}  {'core':>4}  restarts")
    for row in answer["engines"]:
        state = "draining" if row["is_draining"] else row["state"]
        restarts = ", ".join(f"{count} {cause}" for cause, count in row["restarts"].items()) or "-"
        pid = "-" if row["pid"] is None else row["pid"]
        head = f"{row['engine']:>6}  {state:<10} {row['num_requests']:>8}  {pid:>8}  {row['incarnation']:>4}"
        print(f"{head}  {restarts}" + (f"  on {row['host']}" if row.get("host") else ""))
