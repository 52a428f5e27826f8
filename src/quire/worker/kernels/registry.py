"""Chooses the kernels of a worker, and tries an instruction set that none of our machines has before it is used.

The trial (`trial.py`) runs in a process of its own. Its verdict is stored in the cache directory under `trials`, for
this CPU and this library; after the file is deleted the trial runs again.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from quire import envs
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.wire.process import search_path
from quire.worker.kernels import library as library_module
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import DTYPES, NativeKernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.packed_cache import cache_root

logger = init_logger(__name__)


def choose_kernels(device: torch.device, dtype: torch.dtype, num_threads: int) -> Kernels:
    """Returns native kernels on a CPU for the types they support, else torch's. QUIRE_CPU_KERNELS overrides the choice.

    Raises ConfigError if QUIRE_CPU_KERNELS names an instruction set that is not available.
    """
    wanted = envs.CPU_KERNELS.get()
    if device.type != "cpu" or dtype not in DTYPES or wanted == "torch":
        return TORCH_KERNELS
    library = native_library()
    there = [] if library is None else library.instruction_sets()
    if wanted not in ("auto", *there):
        raise ConfigError(
            f"{envs.CPU_KERNELS.name}={wanted!r}: there are no such kernels here; "
            f"known are {', '.join(['auto', 'torch', *there])}"
        )
    if library is None:
        return TORCH_KERNELS
    instruction_set = choose_instruction_set(there) if wanted == "auto" else wanted
    logger.info("native kernels: %s, %d threads", instruction_set, num_threads)
    return NativeKernels(Context(library, num_threads, instruction_set))


TRIAL = "import sys, quire.worker.lean_torch; from quire.worker.kernel_trial import main; sys.exit(main())"
ON_TRIAL = frozenset({"amx"})
"""Instruction sets that few of our machines have. `QUIRE_CPU_KERNELS` uses one of them without a trial."""
TIMEOUT_S = 120.0
AGREES, DISAGREES = 0, 3
"""Exit codes of the trial."""
FATAL_SIGNALS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT})
"""Signals that show a fault of the kernels; others come from outside."""


def choose_instruction_set(names: list[str]) -> str:
    """Returns the best of `names` that needs no trial or has passed it. `names` begins with the best."""
    for i, name in enumerate(names):
        others = [other for other in names[i + 1 :] if other not in ON_TRIAL]
        if name not in ON_TRIAL or (others and has_passed(name, others[0])):
            return name
    return names[-1]


def has_passed(candidate: str, reference: str) -> bool:
    """Returns True if kernels of `candidate` compute on this CPU what those of `reference` do. Logs a warning
    if not."""
    path = cache_root() / "trials" / f"{candidate}-{_fingerprint(candidate, reference)}.json"
    verdict = read_verdict(path)
    if verdict is None:
        verdict, is_final = run_trial(candidate, reference)
        if is_final:
            keep_verdict(path, verdict)
    if verdict["agrees"]:
        return True
    logger.warning(
        "the %s kernels are not used on this CPU: %s; %s takes their place", candidate, verdict["why"], reference
    )
    return False


def run_trial(candidate: str, reference: str, timeout_s: float = TIMEOUT_S) -> tuple[dict[str, Any], bool]:
    """Runs a process that compares the two. Returns ({"agrees", "why"}, True if another trial would have the same
    result)."""
    logger.info("trying the %s kernels on this CPU, once", candidate)
    command = [sys.executable, "-P", "-c", TRIAL, candidate, reference]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return {"agrees": False, "why": f"the trial could not be run: {e}"}, False
    if done.returncode == AGREES:
        return {"agrees": True, "why": ""}, True
    if done.returncode == DISAGREES:
        return {"agrees": False, "why": done.stdout.decode(errors="replace").strip().partition("\n")[0]}, True
    if done.returncode < 0:
        ended_by = signal.Signals(-done.returncode)
        return {"agrees": False, "why": f"the trial was ended by {ended_by.name}"}, ended_by in FATAL_SIGNALS
    words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return {"agrees": False, "why": f"the trial ended with exit code {done.returncode}: {''.join(words)}"}, False


def _fingerprint(candidate: str, reference: str) -> str:
    """Returns a digest of what a verdict depends on: the CPU and its microcode, the kernel, the library's code."""
    digest = hashlib.sha256(repr((candidate, reference, os.uname().release, _cpu())).encode())
    digest.update(library_module.LIBRARY.read_bytes())
    return digest.hexdigest()[:32]


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Returns the lines about the first CPU that do not change over time."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return []
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
    return [line for line in lines if line.partition(":")[0].strip() in wanted]


def read_verdict(path: Path) -> dict[str, Any] | None:
    """Returns a verdict that was kept; None if there is none that can be read."""
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if isinstance(verdict, dict) and isinstance(verdict.get("agrees"), bool) and isinstance(verdict.get("why"), str):
        return verdict
    return None


def keep_verdict(path: Path, verdict: dict[str, Any]) -> None:
    """Writes a verdict; a cache that cannot be written to is no error."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(json.dumps(verdict), encoding="utf-8")
        part.replace(path)
    except OSError as e:
        logger.info("what the trial found is not kept in %s: %s", path.parent, e.strerror or e)
