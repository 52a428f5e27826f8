"""`quire complete` on a scripted engine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main as main_module
from quire.cli.complete import DEFAULT_MAX_TOKENS, _failure
from quire.cli.main import main
from quire.errors import ValidationError
from quire.outputs import CompletionOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

from .scripted_engine import ScriptedEngine

Capture = pytest.CaptureFixture[str]
UseEngine = Callable[[ScriptedEngine], ScriptedEngine]


@pytest.fixture
def complete(model_dir: Path) -> Callable[..., int]:
    return lambda *argv: main(["complete", "--model", str(model_dir), *argv])


def by_prompt(prompt: Any, params: SamplingParams) -> list[str]:
    """Returns as many pieces as the prompt has letters."""
    return [f"{prompt}{i} " for i in range(len(prompt))]


def test_prints_the_text_and_nothing_else(complete: Callable[..., int], use_engine: UseEngine, capsys: Capture) -> None:
    engine = use_engine(ScriptedEngine())
    assert complete("one prompt") == 0
    assert capsys.readouterr() == ("Hello there\n", "")
    assert engine.prompts_seen == ["one prompt"]


def test_a_failed_prompt_is_an_error_after_the_others_are_printed(
    complete: Callable[..., int], use_engine: UseEngine, capsys: Capture
) -> None:
    use_engine(ScriptedEngine(lambda prompt, _: ["half", "ERROR"] if prompt == "bad" else ["a", "b", "c"]))
    assert complete("bad", "good") == 1
    out, err = capsys.readouterr()
    assert "half" in out
    assert "abc" in out
    assert err == "quire: error: the engine failed\n"


def test_streams_as_tokens_come(
    complete: Callable[..., int], use_engine: UseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = use_engine(ScriptedEngine(lambda p, _: ["a", "b", "c"]))
    writes: list[tuple[int, str]] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            writes.append((engine.num_steps, text))
            return len(text)

    monkeypatch.setattr(sys, "stdout", Recorder())
    assert complete("x") == 0
    assert [w for w in writes if w[1] not in ("", "\n")] == [(1, "a"), (2, "b"), (3, "c")]


def test_several_prompts_run_at_once_and_print_in_order(
    complete: Callable[..., int], use_engine: UseEngine, capsys: Capture
) -> None:
    engine = use_engine(ScriptedEngine(by_prompt))
    assert complete("xyz", "a") == 0
    assert capsys.readouterr().out == "==> xyz <==\nxyz0 xyz1 xyz2 \n\n==> a <==\na0 \n"
    assert engine.max_running == 2
    assert engine.num_steps == 3


def test_several_outputs_are_numbered(complete: Callable[..., int], use_engine: UseEngine, capsys: Capture) -> None:
    use_engine(ScriptedEngine())
    assert complete("p", "--n", "2", "--echo") == 0
    assert capsys.readouterr().out == "==> p [1/2] <==\npHello there\n\n==> p [2/2] <==\npHello there\n"


def test_prompts_are_read_from_standard_input(
    complete: Callable[..., int], use_engine: UseEngine, stdin: Callable[[str], None], capsys: Capture
) -> None:
    engine = use_engine(ScriptedEngine())
    stdin("from a\npipe\n")
    assert complete() == 0
    stdin("again")
    assert complete("first", "-") == 0
    assert engine.prompts_seen == ["from a\npipe", "first", "again"]
    assert complete("-", "-") == 2
    assert "named twice" in capsys.readouterr().err


def test_parameters_command_line_over_model_over_own(complete: Callable[..., int], use_engine: UseEngine) -> None:
    engine = use_engine(ScriptedEngine())
    assert complete("x", "--temperature", "0.9", "--stop", "END", "--stop=2", "--seed", "5", "--top-k", "3") == 0
    (params,) = engine.params_seen
    assert (params.temperature, params.top_p, params.top_k) == (0.9, 0.9, 3)  # top_p from generation_config.json
    assert (params.stop, params.seed, params.max_tokens) == (["END", "2"], 5, DEFAULT_MAX_TOKENS)
    assert params.output_kind is RequestOutputKind.DELTA


def test_the_form_of_the_output(complete: Callable[..., int], use_engine: UseEngine, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}', encoding="utf-8")
    forms = []
    for flags in (["--json-schema", str(schema)], ["--choice", "a", "--choice=b"], ["--grammar", "root ::= x"], []):
        engine = use_engine(ScriptedEngine())
        assert complete("x", *flags) == 0
        forms.append(engine.params_seen[0].structured_outputs)
    assert [form and form.source for form in forms] == [
        ("json", '{"type": "null"}'),
        ("choice", '["a", "b"]'),
        ("grammar", "root ::= x"),
        None,
    ]
    use_engine(ScriptedEngine())
    assert complete("x", "--json-schema", "nowhere.json") == 2
    assert complete("x", "--regex", "a", "--choice", "b") == 2


def test_config_file_holds_sampling_and_engine_flags(
    complete: Callable[..., int], use_engine: UseEngine, tmp_path: Path
) -> None:
    engine = use_engine(ScriptedEngine())
    config = tmp_path / "c.yaml"
    config.write_text("temperature: 0\nmax-tokens: 3\nmax-num-seqs: 4\n")
    assert complete("x", "--config", str(config), "--max-tokens", "5") == 0
    assert (engine.params_seen[0].temperature, engine.params_seen[0].max_tokens) == (0.0, 5)


def test_json_rows_are_printed_as_they_finish(
    complete: Callable[..., int], use_engine: UseEngine, capsys: Capture
) -> None:
    use_engine(ScriptedEngine(by_prompt))
    assert complete("xyz", "a", "--json", "--n", "2", "--logprobs", "1") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["a", "xyz"]  # as they finish
    assert rows[1]["usage"] == {"prompt_tokens": 1, "cached_tokens": 1, "completion_tokens": 6}
    first = rows[1]["outputs"][0]
    assert (first["text"], first["token_ids"], first["finish_reason"]) == ("xyz0 xyz1 xyz2 ", [0, 1, 2], "stop")
    assert [o["index"] for o in rows[1]["outputs"]] == [0, 1]
    assert first["logprobs"][0]["0"] == {"logprob": -1.5, "rank": 2, "token": "xyz0 "}


def test_stats_go_to_stderr(complete: Callable[..., int], use_engine: UseEngine, capsys: Capture) -> None:
    use_engine(ScriptedEngine())
    assert complete("a b c", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "Hello there\n"
    assert err.startswith("3 prompt tokens (1 cached), 2 generated; TTFT ")
    assert "tok/s" in err


def test_interrupt_keeps_what_was_printed(complete: Callable[..., int], use_engine: UseEngine, capsys: Capture) -> None:
    use_engine(ScriptedEngine(lambda p, _: ["a"] * 9, interrupt_at_step=2))
    assert complete("x", "y") == 130
    assert capsys.readouterr() == ("==> x <==\naa\n", "")


def test_bad_prompt_and_bad_parameters(complete: Callable[..., int], use_engine: UseEngine, capsys: Capture) -> None:
    use_engine(ScriptedEngine(max_model_len=3))
    assert complete("a b c d") == 2
    assert complete("x", "--min-tokens", "9", "--max-tokens", "3") == 2
    assert complete("x", "--n", "2", "--temperature", "0") == 2
    out, err = capsys.readouterr()
    assert "do not fit 3" in err
    assert "min_tokens=9 is more than max_tokens=3" in err
    assert out == ""


def test_a_failure_keeps_its_class_and_names_the_flag() -> None:
    output = CompletionOutput(0, "", [], None, None, "error")
    output.error_message, output.error_type = "structured_outputs.json cannot be compiled: no", "ValidationError"
    error = _failure(output)
    assert isinstance(error, ValidationError)
    assert str(error) == "--json-schema cannot be compiled: no"


def test_a_schema_that_is_not_there(complete: Callable[..., int], use_engine: UseEngine, capsys: Capture) -> None:
    use_engine(ScriptedEngine())
    assert complete("hi", "--json-schema", "nosuch.json") == 2
    err = capsys.readouterr().err
    assert "--json-schema nosuch.json: it is neither a JSON schema nor a file that can be read: No such file" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told_in_one_line() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(main_module.__file__).parents[2])}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quire", "info"], stdout=full, stderr=subprocess.PIPE, env=environment, timeout=120
        )
    assert done.returncode == 2
    assert done.stderr == b"quire: error: the output cannot be written: No space left on device\n"


def test_a_bad_checkpoint_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    demo = Path(main_module.__file__).parents[1] / "assets" / "demo"
    for file in demo.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])
    assert main(["complete", "hi", "--model", str(tmp_path)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("quire: error: ")
    assert line.endswith("its header needs 6032 bytes and the file has 1000; download it again")


@pytest.mark.parametrize(("text", "name", "path"), [("sql=/a/b", "sql", "/a/b"), ("/a/b", "b", "/a/b")])
def test_an_adapter_answers(
    complete: Callable[..., int], use_engine: UseEngine, text: str, name: str, path: str
) -> None:
    engine = use_engine(ScriptedEngine())
    assert complete("one", "two", "--lora", text) == 0
    assert [(lora.lora_name, lora.lora_path) for lora in engine.loras_seen if lora is not None] == [(name, path)] * 2
    assert complete("three") == 0
    assert engine.loras_seen[2] is None


def test_an_adapter_of_a_server_is_a_model(complete: Callable[..., int], capsys: Capture) -> None:
    assert complete("x", "--lora", "sql=/a", "--url", "http://localhost:1") == 2
    assert "with --url name it by --model" in capsys.readouterr().err
