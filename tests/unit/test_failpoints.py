"""Every failpoint is called, once, in the part of the code its name says; and nothing else is called one."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.measures import parse

import quire
from quire.failpoints import FAILPOINTS

PACKAGE = Path(quire.__file__).parent
WHERE = {
    "worker": "worker",
    "frontend": "frontend",
    "core": "engine",
    "group": "engine",
    "client": "frontend",
    "kernels": "worker",
    "lora": "worker",
    "kv": "kv_store",
}
"""First word of a failpoint -> folder."""
PLACES = {
    "core.start": ("proc.py", "run_engine_core"),
    "core.ready": ("proc.py", "run_engine_core"),
    "core.input.decode": ("intake.py", "take_message"),
    "core.input.queued": ("intake.py", "_take_add"),
    "core.loop.input": ("proc.py", "_handle_client_request"),
    "core.step.schedule": ("core.py", "_schedule"),
    "core.step.execute": ("core.py", "_execute_later"),
    "core.step.update": ("core.py", "_update"),
    "core.step.draft": ("core.py", "post_step"),
    "core.output.queued": ("proc.py", "_process_engine_step"),
    "core.output.send": ("io_threads.py", "_encode_and_send"),
    "core.shutdown": ("proc.py", "_handle_shutdown"),
    "group.switch": ("dp.py", "_switch"),
    "worker.standby": ("standby.py", "_read"),
    "lora.read": ("loader.py", "run"),
    "lora.pack": ("loader.py", "_pack_all"),
    "lora.install": ("table.py", "_install"),
    "lora.remove": ("table.py", "_remove"),
    "kernels.trial": ("kernel_trial.py", "main"),
    "kv.read": ("extent.py", "read_into"),
    "kv.write": ("extent.py", "append"),
    "kv.seal": ("extent.py", "write_table"),
    "kv.evict": ("directory.py", "remove"),
    "kv.peer.send": ("server.py", "_send_block"),
    "kv.peer.put": ("client.py", "put"),
    "kv.peer.receive": ("client.py", "_take_blocks"),
    "kv.peer.message": ("server.py", "_take"),
    "kv.peer.answer": ("client.py", "_receive"),
    "worker.step": ("proc.py", "_serve"),
    "worker.load": ("worker.py", "load_model"),
    "worker.barrier": ("shm.py", "_reach"),
    "worker.experts": ("pool.py", "ready"),
    "worker.stage": ("stages.py", "receive"),
    "client.add.journaled": ("link_thread.py", "_send_messages"),
    "client.output.received": ("link_thread.py", "_receive_outputs"),
    "client.resume": ("link_thread.py", "_receive_ready"),
    "frontend.stats.record": ("stat_loggers.py", "_each"),
}


def _calls() -> list[tuple[str, Path, str]]:
    """(name, file, function) of every call."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(parse(text)) if "failpoint(" in text else ():
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found += [(name, path, function.name) for name in _names(function)]
    return found


def _names(function: ast.AST) -> list[str]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    named = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "failpoint"]
    return [c.args[0].value if isinstance(c.args[0], ast.Constant) else "?" for c in named]


def test_every_failpoint_is_called_once_where_it_says() -> None:
    called = _calls()
    assert sorted(name for name, _, _ in called) == sorted(FAILPOINTS)
    for name, path, function in called:
        assert PLACES[name] == (path.name, function), name
        assert path.relative_to(PACKAGE).parts[0] == WHERE[name.partition(".")[0]]


def test_nested_functions_would_be_seen_twice() -> None:
    """`_calls` looks into functions: a call outside of any, or in one inside another, would not be counted once."""
    source = "def f():\n    def g():\n        failpoint('core.start')"
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    assert [_names(f) for f in functions] == [["core.start"], ["core.start"]]
