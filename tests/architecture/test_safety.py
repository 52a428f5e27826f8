"""Promises P18, P20 and P21: nothing in the package runs foreign code or reads without a bound what others send."""

from __future__ import annotations

import pytest

from .safety import FORBIDDEN_MODULES, dangers, file_reads, nodes_of, unbounded_reads
from .sources import CHECKOUT, ROOT

OUTSIDE = sorted(p for folder in ("tools", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py"))

ONE_DOOR = {
    "quire": "importlib.import_module",  # the public face, loaded when first used: names of its own table
    "quire.resolve": "importlib.import_module",  # composition by dotted name, from configuration
    "tools/demo_model/train.py": "torch.load",  # its own optimizer state, weights_only; not shipped
}
"""Modules that are the one place for something otherwise forbidden."""
FED_FROM_OUTSIDE = ("wire", "engine", "worker", "frontend")
"""Folders that handle what arrives from other processes."""
SOCKETS = "quire.wire.sockets"
"""The one maker of sockets: it bounds the size of a message."""


def test_nothing_that_runs_foreign_code() -> None:
    broken = [
        f"{source.module}, {danger}"
        for source in CHECKOUT.sources
        for danger in dangers(source.nodes)
        if danger.split(": ")[1] != ONE_DOOR.get(source.module)
    ]
    assert not broken, "\n".join(broken)


def test_nor_beside_the_package() -> None:
    broken = []
    for path in OUTSIDE:
        name = str(path.relative_to(ROOT))
        found = dangers(nodes_of(path.read_text(encoding="utf-8")))
        broken += [f"{name}, {danger}" for danger in found if danger.split(": ")[1] != ONE_DOOR.get(name)]
    assert not broken, "\n".join(broken)


def test_nothing_is_read_without_a_bound() -> None:
    broken = [
        f"{source.module}, {read}"
        for source in CHECKOUT.sources
        if source.folder.split("/")[0] in FED_FROM_OUTSIDE
        for read in unbounded_reads(source.nodes)
        if source.module != SOCKETS or not read.endswith(("context.socket()", "own_view.socket()"))
    ]
    assert not broken, "\n".join(broken)


READS_FILES = {
    "quire.config.checkpoint",  # the door to what a model repository holds, and its weights' headers
    "quire.config.flags",  # @FILE for a JSON flag, on the command line
    "quire.config.model_impl",  # a table of the package
    "quire.config.server",  # --api-key-file
    "quire.config.vllm_flags",  # a table of the package
    "quire.frontend.supervision.launch",  # the system's figures of a process that it has started
    "quire.frontend.text.tokenizer",  # --chat-template
    "quire.frontend.openai.routes.pages",  # pages of the package
}
"""Modules of `config` and `frontend` that open files; a new one asks itself whose they are."""


def test_files_of_repositories_come_through_one_door() -> None:
    broken = [
        f"{source.module}, {read}"
        for source in CHECKOUT.sources
        if source.folder.split("/")[0] in ("config", "frontend") and source.module not in READS_FILES
        for read in file_reads(source.nodes)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("source", ["path.read_text()", "(a / b).read_bytes()", "open(path)", "path.open('rb')"])
def test_planted_file_reads_are_found(source: str) -> None:
    assert file_reads(nodes_of(source))


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
    assert dangers(nodes_of(source))


def test_every_forbidden_module_is_found() -> None:
    for module in FORBIDDEN_MODULES:
        assert dangers(nodes_of(f"import {module}")), module
        assert dangers(nodes_of(f"from {module} import anything")), module


@pytest.mark.parametrize("source", HARMLESS)
def test_what_is_harmless_is_let_be(source: str) -> None:
    assert not dangers(nodes_of(source))


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
    assert unbounded_reads(nodes_of(source))


@pytest.mark.parametrize("source", ["file.read(8)", "file.read(size)", "file.read(size=8)", "socket.socket(family)"])
def test_bounded_reads_are_let_be(source: str) -> None:
    assert not unbounded_reads(nodes_of(source))
