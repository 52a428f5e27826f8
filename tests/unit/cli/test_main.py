"""Dispatch, help, exit codes and what reaches the two output streams."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import __version__
from quire.cli import main as main_module
from quire.cli.command_line import CommandLine
from quire.cli.main import ALIASES, COMMANDS, find_help_topic, format_help, main
from quire.config.engine_args import FLAGS
from quire.errors import ConfigError, EngineDeadError, QuireError, ValidationError
from quire.resolve import resolve

Capture = pytest.CaptureFixture[str]


def lines() -> dict[str, CommandLine]:
    return {c.name: resolve(f"{c.entry}command_line")() for c in COMMANDS}


def test_overview_names_every_command(capsys: Capture) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert all(c.name in out and c.help in out for c in COMMANDS)
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert "bench latency" in out
    assert "collect-env" not in out


def test_the_version_is_printed(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"quire {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["complet"], "unknown command 'complet'; did you mean complete?"),
        (["bench", "latncy"], "unknown command 'bench latncy'; did you mean bench latency?"),
        (["xyzzy"], "unknown command 'xyzzy'; see quire --help"),
        (["--verbose"], "unknown flag --verbose before a command"),
        (["complete", "--temprature", "0"], "unknown flag --temprature; did you mean --temperature?"),
        (["complete", "--help=xyzzy"], "no flag or group matches 'xyzzy'"),
        (["batch", "in.jsonl"], "give the requests and the results"),
        (["info", "/no/such/model"], "/no/such/model is not a directory"),
    ],
)
def test_mistakes_exit_2_with_one_line(argv: list[str], message: str, capsys: Capture) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("quire: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


# -- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_help_names_every_flag(command: main_module.Command, capsys: Capture) -> None:
    assert main([*command.name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    for option in lines()[command.name].options:
        assert option.flag in text
    assert text.startswith(f"usage: quire {command.name}")


def test_a_help_topic_is_found_among_the_words() -> None:
    assert find_help_topic(["a", "--x"]) is None
    assert find_help_topic(["-h"]) == find_help_topic(["--help"]) == ""
    assert find_help_topic(["--x", "--help=ModelConfig"]) == "ModelConfig"
    assert find_help_topic(["--", "--help"]) is None


def test_help_finds_every_flag_by_its_topic() -> None:
    line = lines()["complete"]
    every = format_help(line, "all")
    assert all(spec.option in every for spec in FLAGS.values())
    cache = format_help(line, "CacheConfig")
    assert cache == format_help(line, "cache")
    assert cache.startswith("CacheConfig:")
    assert "--block-size" in cache
    assert "--temperature" not in cache
    one = format_help(line, "--max_num_seqs")
    assert "--max-num-seqs" in one
    assert "--max-num-batched-tokens" not in one
    assert {"--max-num-seqs", "--max-num-batched-tokens"} <= set(format_help(line, "max-num").split())
    assert "--stop" in format_help(line, "end the output")
    assert "SchedulerConfig" in format_help(line, "listgroup").splitlines()
    with pytest.raises(ConfigError, match="did you mean temperature"):
        format_help(line, "temperatur!")


def test_help_shows_defaults_and_choices() -> None:
    text = format_help(lines()["complete"], "all")
    assert "--block-size N" in text
    assert "(default: 16)" in text
    assert "{fcfs,priority}" in text
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in text


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Run `quire collect-env` with a body that raises."""

    def run(error: BaseException) -> int:
        def raise_it(args: object) -> int:
            raise error

        monkeypatch.setattr("quire.cli.collect_env.run", raise_it)
        return main(["collect-env"])

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValidationError("n=0"), 2), (ConfigError("a\n  flag"), 2), (EngineDeadError("dead"), 1), (QuireError("x"), 1)],
)
def test_an_error_has_its_exit_code_and_one_line(
    error: QuireError, code: int, failing: Callable[[BaseException], int], capsys: Capture
) -> None:
    assert failing(error) == code
    err = capsys.readouterr().err
    assert err == f"quire: error: {' '.join(str(error).split())}\n"


def test_debug_level_shows_the_traceback() -> None:
    argv = ("-m", "quire", "info", "/no/such/model")
    quiet, loud = run_quire(*argv), run_quire(*argv, env={"QUIRE_LOGGING_LEVEL": "DEBUG"})
    assert (quiet.returncode, quiet.stderr.count("\n")) == (2, 1)
    assert loud.returncode == 2
    assert "Traceback" in loud.stderr
    assert loud.stderr.endswith(quiet.stderr)


def test_interrupt_is_130_and_quiet(failing: Callable[[BaseException], int], capsys: Capture) -> None:
    assert failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")


def run_quire(*argv: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(main_module.__file__).parents[2]), **kwargs.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, timeout=120, **kwargs)  # type: ignore[call-overload,no-any-return]


def test_python_dash_m() -> None:
    done = run_quire("-m", "quire", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"quire {__version__}\n", "")


def test_broken_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONPATH": str(Path(main_module.__file__).parents[2])}
    command = [sys.executable, "-m", "quire", "complete", "--help=all"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_unknown_environment_variable_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("QUIRE_LOGING_LEVEL", "INFO")
    assert main(["complete", "hi"]) == 2
    assert "did you mean QUIRE_LOGGING_LEVEL?" in capsys.readouterr().err


def test_a_log_level_that_does_not_exist() -> None:
    done = run_quire("-m", "quire", "info", env={"QUIRE_LOGGING_LEVEL": "LOUD"})
    assert done.returncode == 2
    assert done.stderr == (
        "quire: error: QUIRE_LOGGING_LEVEL='LOUD' is no log level; Log level: DEBUG, INFO, WARNING or ERROR.\n"
    )


HEAVY = ("torch", "numpy", "tokenizers", "transformers", "safetensors", "huggingface_hub", "yaml")


def test_help_loads_nothing_heavy() -> None:
    """All commands in one process, in which nothing may be loaded by any of them."""
    names = ["", *(c.name for c in COMMANDS), *ALIASES]
    code = (
        f"import sys; from quire.cli.main import main\nfor name in {names!r}:\n"
        "    assert main([*name.split(), '--help']) == 0\n"
        f"    print('LOADED', name, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = run_quire("-c", code)
    loaded = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert loaded == [f"LOADED {name} []" for name in names], done.stderr
