"""Promises P18, P20 and P21: nothing in the package runs foreign code or reads without a bound what others send."""

from __future__ import annotations

from pathlib import Path

import pytest

from .imports import PACKAGE, module_name, source_files
from .safety import FORBIDDEN_MODULES, dangers, file_reads, unbounded_reads

ROOT = PACKAGE.parents[1]
FILES = source_files()
IDS = [module_name(f) for f in FILES]
OUTSIDE = sorted(p for folder in ("tools", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py"))

ONE_DOOR = {
    "quire": "importlib.import_module",  # the public face, loaded when first used: names of its own table
    "quire.resolve": "importlib.import_module",  # composition by dotted name, from configuration
    "tools/demo_model/train.py": "torch.load",  # its own optimizer state, weights_only; not shipped
}
"""Modules that are the one place for something otherwise forbidden."""
FED_FROM_OUTSIDE = ("wire", "engine", "worker", "frontend", "coordinator")
"""Folders that handle what arrives from other processes."""
SOCKETS = "quire.wire.sockets"
"""The one maker of sockets: it bounds the size of a message."""


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_nothing_that_runs_foreign_code(path: Path) -> None:
    allowed = ONE_DOOR.get(module_name(path))
    found = [danger for danger in dangers(path.read_text(encoding="utf-8")) if danger.split(": ")[1] != allowed]
    assert not found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(ROOT)))
def test_nor_beside_the_package(path: Path) -> None:
    allowed = ONE_DOOR.get(str(path.relative_to(ROOT)))
    assert not [danger for danger in dangers(path.read_text(encoding="utf-8")) if danger.split(": ")[1] != allowed]


@pytest.mark.parametrize(
    "path", [f for f in FILES if f.relative_to(PACKAGE).parts[0] in FED_FROM_OUTSIDE], ids=module_name
)
def test_nothing_is_read_without_a_bound(path: Path) -> None:
    found = unbounded_reads(path.read_text(encoding="utf-8"))
    if module_name(path) == SOCKETS:
        found = [
            read for read in found if not read.endswith("context.socket()") and not read.endswith("own_view.socket()")
        ]
    assert not found


READS_FILES = {
    "quire.config.checkpoint",  # the door to what a model repository holds, and its weights' headers
    "quire.config.server",  # --api-key-file
    "quire.config.vllm_flags",  # a table of the package
    "quire.frontend.text.tokenizer",  # --chat-template
    "quire.frontend.openai.routes.pages",  # pages of the package
}
"""Modules of `config` and `frontend` that open files; a new one asks itself whose they are."""


@pytest.mark.parametrize(
    "path", [f for f in FILES if f.relative_to(PACKAGE).parts[0] in ("config", "frontend")], ids=module_name
)
def test_files_of_repositories_come_through_one_door(path: Path) -> None:
    found = file_reads(path.read_text(encoding="utf-8"))
    assert not found or module_name(path) in READS_FILES


@pytest.mark.parametrize("source", ["path.read_text()", "(a / b).read_bytes()", "open(path)", "path.open('rb')"])
def test_planted_file_reads_are_found(source: str) -> None:
    assert file_reads(source)


PLANTED = [
    "import pickle",
    "import pickle as harmless",
    "from pickle import loads",
    "import os, marshal",
    "import multiprocessing.connection",
    "from multiprocessing import Queue",
    "from concurrent.futures import ProcessPoolExecutor",
    "eval('1')",
    "exec(text)",
    "compile(text, '', 'exec')",
    "__import__(name)",
    "from builtins import eval as f",
    "import builtins\nbuiltins.exec(text)",
    "import importlib\nimportlib.import_module(name)",
    "import torch\ntorch.load(path)",
    "import torch as t\nt.load(path, weights_only=True)",
    "from torch import load",
    "import torch\nf(path, weights_only=False)",
    "import torch\ntorch.hub.load(name)",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "import numpy as np\nnp.load(path, allow_pickle=flag)",
    "import yaml\nyaml.load(text)",
    "import yaml as y\ny.load(text, Loader=y.SafeLoader)",
    "socket.recv_pyobj()",
    "self._socket.send_pyobj(1)",
    "import subprocess\nsubprocess.run(text, shell=True)",
    "import os\nos.system(text)",
    "from os import popen",
    "import jinja2\njinja2.Environment()",
    "from jinja2 import Template\nTemplate(text)",
    "AutoModel.from_pretrained(name, trust_remote_code=True)",
    "def f():\n    if x:\n        import shelve",
]
HARMLESS = [
    "import re\nre.compile('x')",
    "model.eval()",
    "import yaml\nyaml.safe_load(text)",
    "import subprocess\nsubprocess.run(words, shell=False)",
    "import numpy as np\nnp.load(path)",
    "from concurrent.futures import Future, ThreadPoolExecutor",
    "import jinja2\ndef f() -> jinja2.Template: ...",
    "from safetensors import safe_open",
    "self.eval(x)\nself.compile()",
]


@pytest.mark.parametrize("source", PLANTED)
def test_what_is_planted_is_found(source: str) -> None:
    assert dangers(source)


@pytest.mark.parametrize("module", sorted(FORBIDDEN_MODULES))
def test_every_forbidden_module_is_found(module: str) -> None:
    assert dangers(f"import {module}")
    assert dangers(f"from {module} import anything")


@pytest.mark.parametrize("source", HARMLESS)
def test_what_is_harmless_is_let_be(source: str) -> None:
    assert not dangers(source)


@pytest.mark.parametrize(
    "source",
    [
        "file.read()",
        "file.read(-1)",
        "file.read(None)",
        "urlopen(x).read()",
        "sys.stdin.readlines()",
        "file.readline()",
        "context.socket(zmq.PULL)",
        "zmq.Context().socket(zmq.PULL)",
    ],
)
def test_planted_unbounded_reads_are_found(source: str) -> None:
    assert unbounded_reads(source)


@pytest.mark.parametrize("source", ["file.read(8)", "file.read(size)", "file.read(size=8)", "socket.socket(family)"])
def test_bounded_reads_are_let_be(source: str) -> None:
    assert not unbounded_reads(source)
