"""Make everything again: tokenizer, main model, draft, evaluation. See README.md for the single steps."""

from __future__ import annotations

import subprocess
import sys

STEPS = (
    ("tokenizer", "src/quire/assets/demo", "src/quire/assets/demo-draft"),
    ("train", "main"),
    ("train", "draft"),
    ("evaluate", "--write"),
)


def main() -> None:
    """Run the steps one after another; the first that fails ends the run."""
    for module, *arguments in STEPS:
        print("==>", module, *arguments, flush=True)
        subprocess.run([sys.executable, "-m", f"tools.demo_model.{module}", *arguments], check=True)


if __name__ == "__main__":
    main()
