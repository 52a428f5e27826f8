"""Make everything again: tokenizer, main model, draft, evaluation. See README.md for the single steps."""

from __future__ import annotations

import os
import subprocess
import sys

STEPS = (
    ("tokenizer", "src/quire/assets/demo", "src/quire/assets/demo-draft"),
    ("train", "main"),
    ("train", "draft"),
    ("evaluate", "--write"),
)

# Tensors of a few megabytes are otherwise mapped and given back to the system at each use: a tenth of a training step.
MEMORY = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"


def main() -> None:
    """Run the steps one after another; the first that fails ends the run."""
    environment = {"GLIBC_TUNABLES": MEMORY, **os.environ}
    for module, *arguments in STEPS:
        print("==>", module, *arguments, flush=True)
        command = [sys.executable, "-m", f"tools.demo_model.{module}", *arguments]
        subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
