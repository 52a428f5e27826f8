"""Run the clients of `table.py` against a real `quire serve` of the demo model.

python -m tests.clients                 the clients of tier 1
python -m tests.clients --tier 2        all of tier 2
python -m tests.clients litellm --url http://127.0.0.1:8000

Each set of requirements gets an environment of its own under build/clients, made once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.process.serving import serving

from .table import CLIENTS, Client

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "clients"
API_KEY = "the-key-of-the-client-tests"
DEMO_MODEL = Path(__file__).parents[2] / "src" / "quire" / "assets" / "demo"


def prepare(client: Client) -> Path:
    """The interpreter of the client's environment. Clients with the same requirements share one."""
    home = ENVIRONMENTS / hashlib.sha256(repr(client.requirements).encode()).hexdigest()[:16]
    python, stamp = home / "bin" / "python", home / "installed"
    if not stamp.exists():
        print(f"==> {client.name}: installing {' '.join(client.requirements)}", flush=True)
        venv.create(home, clear=True)  # without pip, which takes as long as most clients: ours installs into it
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, *client.requirements], check=True)
        stamp.touch()
    return python


def run(client: Client, python: Path, url: str) -> bool:
    """Runs a client. Returns whether it found no fault."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(ENVIRONMENTS),
        "QUIRE_URL": url,
        "QUIRE_API_KEY": API_KEY,
        "QUIRE_DEV_PYTHON": sys.executable,
        "QUIRE_DEMO_MODEL": str(DEMO_MODEL),
    }
    print(f"==> {client.name}", flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run([python, client.program], env=environment, timeout=client.time_limit_s).returncode
    except subprocess.TimeoutExpired:
        print(f"{client.name}: more than {client.time_limit_s:g} s")
        return False
    print(
        f"{client.name}: {'passed' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - start:.1f} s",
        flush=True,
    )
    return code == 0


@contextlib.contextmanager
def server(url: str | None, flags: Sequence[str]) -> Iterator[str]:
    """The base URL of the server to ask: the given one, or one with these flags that lives as long as this."""
    if url is not None:
        yield url
        return
    with serving("--api-key", API_KEY, *flags) as process:
        core = process.core_pid()
        yield process.url
        if process.process.poll() is not None or process.core_pid() != core:
            raise SystemExit("the server or its engine core did not outlive its clients")


def main() -> int:
    """0 if every client was served well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; those of the tier if none")
    parser.add_argument("--tier", type=int, default=1, choices=(1, 2))
    parser.add_argument("--url", help="of a running server, without /v1; its key in the clients' program is " + API_KEY)
    args = parser.parse_args()
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [c for c in CLIENTS if (c.name in args.names if args.names else c.tier == args.tier)]
    pythons = {client.name: prepare(client) for client in chosen}
    failed = []
    for flags in dict.fromkeys(client.server_flags for client in chosen):
        with server(args.url, flags) as url:
            group = [c for c in chosen if c.server_flags == flags]
            failed += [c.name for c in group if not run(c, pythons[c.name], url)]
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
