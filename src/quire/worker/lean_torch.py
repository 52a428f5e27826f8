"""Importing this module before torch makes `import torch` leave out what serving never uses.

More than half of torch's import time goes to its compiler and exporter: rules in Python for the shapes of operators,
decompositions, `torch.export`, quantization for training. Here those modules are entered in sys.modules without being
run; the first access to one of their attributes runs them. Their side effects come at that time, too
(`torch._meta_registrations` registers shape rules): a model that computes on the meta device with an operator whose
rule is in Python needs `QUIRE_LEAN_TORCH=0`.

Only engine core processes import it (`ParallelConfig.core_names`): a user's own process is left alone.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quire import envs

TRIED_VERSIONS = ("2.13.",)
"""Versions of torch this was tried with. Its modules import one another in circles, so which of them can wait must be
tried for each version; with any other, all of it is imported."""
NOT_NEEDED = frozenset(
    {
        *("torch._meta_registrations", "torch.distributed._meta_registrations", "torch.export", "torch.distributions"),
        *("torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.quantization"),
        *("torch.ao", "torch.masked", "torch.profiler", "torch.testing", "torch.utils.data", "torch.fx.passes"),
    }
)
NEEDS_ALL = frozenset({"torch._dynamo", "torch._inductor"})
"""Modules that need all of those to have run: the profiler, for one, imports the compiler. Nothing in `NOT_NEEDED`
imports them."""
_lock = threading.RLock()
_waiting: list[ModuleType] = []
"""Modules that were imported and not run, in the order in which torch imported them."""


class LazyModule(ModuleType):
    """A module that runs its code at the first access to an attribute that the import system has not set."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            _run(self)
        return getattr(self, name)


def _run(module: ModuleType) -> None:
    if type(module) is LazyModule:
        module.__class__ = ModuleType  # type: ignore[assignment]  # from here on a module like any other
        loader = module.__spec__.loader if module.__spec__ is not None else None
        assert isinstance(loader, LazyLoader)
        loader.run(module)


def run_waiting() -> None:
    """Runs all modules that wait."""
    with _lock:
        while _waiting:
            _run(_waiting.pop(0))


class LazyLoader(Loader):
    """A loader of `LazyModule`s, which later run what `loader` would have run at once."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Enters the module without running it."""
        module.__class__ = LazyModule
        _waiting.append(module)

    def run(self, module: ModuleType) -> None:
        """Runs the module."""
        spec = module.__spec__
        assert spec is not None  # the import system has set it
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)


class LazyFinder(MetaPathFinder):
    """Finds the modules named in `NOT_NEEDED` and gives them a `LazyLoader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NEEDS_ALL and "torch.nn" in sys.modules:
            run_waiting()
        if fullname not in NOT_NEEDED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def installed_version() -> str:
    """Returns torch's version, read from its files without importing it; empty if there is none."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    return found.group(1) if found else ""


if envs.LEAN_TORCH.flag() and "torch" not in sys.modules and installed_version().startswith(TRIED_VERSIONS):
    sys.meta_path.insert(0, LazyFinder())
