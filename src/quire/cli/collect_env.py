"""`quire collect-env`: the facts that a bug report needs, without secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from quire import __version__, envs
from quire.cli.command_line import Arguments, CommandLine, Option
from quire.cli.machine import cpu_facts, memory_facts
from quire.cli.terminal import human_bytes

_PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "msgspec", "jinja2", "huggingface_hub", "tqdm", "transformers",
)  # fmt: skip
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


def command_line() -> CommandLine:
    return CommandLine(
        "quire collect-env",
        "Print versions, hardware and settings, for a bug report. Values that look secret are left out.",
        [Option(name="json", help="Print one JSON object.", is_switch=True, default=False)],
    )


def run(args: Arguments) -> int:
    facts = collect_facts()
    if args["json"]:
        print(json.dumps(facts, indent=2))
        return 0
    for section, values in facts.items():
        print(f"{section}:")
        for name, value in values.items() or {"(none set)": ""}.items():
            print(f"  {name:<22}{_shown(name, value)}".rstrip())
    return 0


def collect_facts() -> dict[str, dict[str, Any]]:
    """Returns sections of name -> value, fit for JSON."""
    return {
        "software": {
            "quire": __version__,
            "python": platform.python_version(),
            "executable": Path(sys.executable).name,
            "os": _os_name(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "hardware": {**cpu_facts(), **memory_facts(), "gpus": _gpus()},
        "threads": {"cpu_count": os.cpu_count(), **_torch_threads(), **_variables(_THREAD_VARIABLES)},
        "environment": quire_variables(),
    }


def quire_variables() -> dict[str, str]:
    """Returns every QUIRE_* variable that is set, secrets redacted, unknown names (Quire refuses to start) marked."""
    known = {v.name for v in envs.ENV_VARS}
    return {
        name: redact(name, value) + ("" if name in known else "  (not known to Quire)")
        for name, value in sorted(os.environ.items())
        if name.startswith("QUIRE_")
    }


def redact(name: str, value: str) -> str:
    """Returns `value`, or a placeholder if the variable's name looks like a secret's."""
    return "(redacted)" if _SECRET.search(name) else value


def _variables(names: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _os_name() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = platform.system()
    return f"{name} ({platform.release()}, {platform.machine()})"


def _torch_threads() -> dict[str, Any]:
    try:
        import torch  # heavy, and a broken torch must not keep the report from being printed
    except (ImportError, OSError) as e:
        return {"torch_error": f"{type(e).__name__}: {e}"}
    return {"torch_threads": torch.get_num_threads(), "torch_interop_threads": torch.get_num_interop_threads()}


def _gpus() -> list[str]:
    try:
        import torch
    except (ImportError, OSError):
        return []
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{d.name}, {human_bytes(d.total_memory)}, compute {d.major}.{d.minor}" for d in devices]


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value is not None:
        return human_bytes(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
