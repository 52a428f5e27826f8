"""Finds what may run foreign code, or take memory without bound, in syntax trees: nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing",  # its queues, pipes and pools pickle
    "xmlrpc",
    "runpy",
    "code",
    "codeop",
}
FORBIDDEN_NAMES = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.process",
    "importlib.import_module",
    "jinja2.Environment",
    "jinja2.Template",
    "jinja2.sandbox.SandboxedEnvironment",
    "numpy.lib.format.read_array",
    "os.popen",
    "os.system",
    "tempfile.mktemp",
    "torch.hub.load",
    "torch.jit.load",
    "torch.load",
    "yaml.full_load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
}
"""Functions and classes by full name; what is built in by its own."""
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "read_pickle"}
"""Methods that are forbidden on any object."""
FORBIDDEN_ARGUMENTS = {"allow_pickle": False, "shell": False, "trust_remote_code": False, "weights_only": True}
"""Keyword arguments that must not be anything else."""


def nodes_of(text: str) -> list[ast.AST]:
    """Returns the nodes of the syntax tree of a source text."""
    return list(ast.walk(ast.parse(text)))


def dangers(nodes: Sequence[ast.AST]) -> list[str]:
    """Returns what in a file runs foreign code, as "line 3: torch.load"."""
    aliases = _aliases(nodes)
    return [f"line {line}: {what}" for node in nodes for line, what in _dangers_of(node, aliases)]


def unbounded_reads(nodes: Iterable[ast.AST]) -> list[str]:
    """Returns the calls that read as much as is sent: `read()` without a size, and a ZMQ socket made by hand, which has
    no bound on a message."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            is_unbounded = node.func.attr in ("read", "readlines", "readline", "readall") and not _has_size(node)
            if is_unbounded or (node.func.attr == "socket" and called != "socket.socket"):
                found.append(f"line {node.lineno}: {called}()")
    return found


def file_reads(nodes: Iterable[ast.AST]) -> list[str]:
    """Returns the calls that open a file by its path."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "read_bytes", "open")
            called = ast.unparse(node.func)
            is_awaited_body = called in ("self.read_bytes", "exchange.read_bytes")
            if (is_method or called == "open") and not is_awaited_body and not called.startswith(("os.", "self.")):
                found.append(f"line {node.lineno}: {called}()")
    return found


def _has_size(call: ast.Call) -> bool:
    if not call.args:
        return bool(call.keywords)
    return not (isinstance(call.args[0], ast.UnaryOp) or ast.unparse(call.args[0]) == "None")


def _aliases(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Returns name in this file -> full name: `import numpy as np`, `from torch import load as l`."""
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return aliases


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    head, dot, rest = ast.unparse(node).partition(".")
    return (aliases.get(head, head) + dot + rest).removeprefix("builtins.")


def _dangers_of(node: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if _is_forbidden_module(alias.name):
                yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
        for name in (f"{node.module}.{alias.name}".removeprefix("builtins.") for alias in node.names):
            if _is_forbidden_module(name) or name in FORBIDDEN_NAMES - {"jinja2.Template", "jinja2.Environment"}:
                yield node.lineno, name
    elif isinstance(node, ast.Call):
        yield from _dangers_of_call(node, aliases)


def _dangers_of_call(node: ast.Call, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    name = _full_name(node.func, aliases)
    if name in FORBIDDEN_NAMES:
        yield node.lineno, name
    if isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_METHODS:
        yield node.lineno, node.func.attr
    for keyword in node.keywords:
        if keyword.arg in FORBIDDEN_ARGUMENTS and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is FORBIDDEN_ARGUMENTS[keyword.arg]
        ):
            yield node.lineno, f"{name}({keyword.arg}=…)"


def _is_forbidden_module(name: str) -> bool:
    return name.split(".")[0] in FORBIDDEN_MODULES
