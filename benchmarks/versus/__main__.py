"""Quire and whichever peers are installed, on the same checkpoints and workloads, in one run.

    benchmarks/peers/setup                                        # installs the peers and makes the checkpoints
    python -m benchmarks.versus --model tiny --workloads W1,W2,W3,W4
    python -m benchmarks.versus --model tiny,half --workloads all --update-docs
    python -m benchmarks.versus --from-json a.json b.json         # the table of earlier runs

Each engine is a process of its own with the same cores and threads, stays loaded, and is frozen while another is
measured; repetitions take turns. What fails or takes longer than --limit-s is a cell that says so. Workloads: W1 one
stream, W2 mixed, W3 shared prefix, W4 many short, W5 served under Poisson load, W6 start to first token.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.versus.comparison import Comparison, parse, say
from benchmarks.versus.table import format_report, merge, update_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv, __doc__)
    if options.from_json:
        report = merge([json.loads(path.read_text(encoding="utf-8")) for path in options.from_json])
    else:
        signal.signal(signal.SIGTERM, _interrupt)
        report = Comparison(options).run()
        options.output_json.parent.mkdir(parents=True, exist_ok=True)
        options.output_json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        say(f"figures: {options.output_json}")
    text = format_report(report)
    print(text)
    if options.update_docs:
        update_page(PAGE, text)
    return 0


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; no process is left", file=sys.stderr)
        sys.exit(130)
