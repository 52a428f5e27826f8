"""An engine for tests: talks as `benchmarks/peers/driver.py` does, and misbehaves as FAKE_MODE says.

It has a child, which must not outlive it. The child's process id goes to the file FAKE_CHILD.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "peers"))

from driver import Request, Result, Run, Setting, check_lengths, main  # type: ignore[import-not-found]


def load(setting: Setting) -> tuple[str, Run]:
    mode = os.environ.get("FAKE_MODE", "")
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(os.environ["FAKE_CHILD"]).write_text(str(child.pid))
    print("this is no answer")
    if mode == "no model":
        raise OSError("no\nmodel")

    def run(requests: list[Request], prefix: int) -> Result:
        if mode == "hang" and len(requests) > 1:
            sys.stdin.read()  # for ever: the input stays open
        if mode == "die" and len(requests) > 1:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        check_lengths([length - (mode == "short") for _, length in requests], requests)
        wall = sum(len(ids) + length for ids, length in requests) + prefix
        return Result(float(wall), 1.0, 0.5) if len(requests) == 1 else Result(float(wall))

    return f"fake {setting.threads}", run


if __name__ == "__main__":
    sys.exit(main(load))
