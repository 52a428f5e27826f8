"""vLLM's flags as `quire serve` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli import complete
from quire.cli.main import format_help
from quire.cli.serve import command_line
from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["m", "-pcp", "1", "-O3", "--seed", "1"], {"seed": 1}),
        (["m", "--cudagraph-capture-sizes", "1", "2", "4"], {}),
        (["m", "--served-model-name", "a", "b"], {"served_model_name": ["a", "b"]}),
        (["--served-model-name", "a", "m"], {"served_model_name": "a"}),
        (["m", "--structured-outputs-config", '{"backend": "guidance"}'], {"grammar_backend": "guidance"}),
        (["m", "--structured-outputs-config.backend=guidance"], {"grammar_backend": "guidance"}),
        (["m", "--structured_outputs_config.reasoning_parser", "qwen3"], {"reasoning_parser": "qwen3"}),
        (["m", "--guided-decoding-backend", "guidance:no-fallback"], {"grammar_backend": "guidance"}),
        (["m", "--enable-lora", "--max-loras", "4", "--fully-sharded-loras"], {"enable_lora": True, "max_loras": 4}),
        (["m", "--lora-modules", "a=/x", "b=/y", "--port", "1"], {"lora_modules": ["a=/x", "b=/y"], "port": 1}),
    ],
)
def test_command_lines_of_vllm(argv: list[str], given: dict[str, object]) -> None:
    assert command_line().parse(argv).given == {"model_name": "m", **given}


def test_our_own_flag_wins_over_one_that_is_read_as_it() -> None:
    argv = ["m", "--guided-decoding-backend", "guidance", "--grammar-backend", "auto"]
    assert command_line().parse(argv)["grammar_backend"] == "auto"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "-pcp", "2"], "--prefill-context-parallel-size 2 is not supported: the tokens of a context"),
        (["m", "--default-mm-loras", '{"audio": "x"}'], "is not supported: there are no multimodal models"),
        (["m", "--guided-decoding-backend", "magic"], "grammar backend 'magic' is not one of"),
        (["m", "--structured-outputs-config", "[]"], "is not a JSON object"),
        (["m", "--max-num-seq", "3"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--served-model-name", "a", "b", "m"], "unexpected argument 'm'"),
    ],
)
def test_what_cannot_be_is_said(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_line().parse(argv)
    assert message in str(caught.value)


def test_config_files_may_hold_them(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prefill-context-parallel-size: 1\nserved-model-name: [a, b]\nmax-num-seqs: 3\n")
    args = command_line().parse(["m", "--config", str(file)])
    assert (args["served_model_name"], args["max_num_seqs"]) == (["a", "b"], 3)
    file.write_text("prefill-context-parallel-size: 4\n")
    with pytest.raises(ConfigError, match="prefill-context-parallel-size 4 is not supported"):
        command_line().parse(["m", "--config", str(file)])


def test_help_knows_them() -> None:
    assert "Refused: the tokens of a context" in format_help(command_line(), "prefill-context-parallel-size")
    assert "--prefill-context-parallel-size" not in format_help(command_line(), "all")


def test_other_commands_do_not_take_them() -> None:
    with pytest.raises(ConfigError, match="--prefill-context-parallel-size"):
        complete.command_line().parse(["--prefill-context-parallel-size", "1", "hello"])


def test_a_model_may_have_several_names() -> None:
    config = EngineArgs("demo", served_model_name=["a", "b"]).create_engine_config().model_config
    assert (config.name, config.names) == ("a", ("a", "b"))
    assert EngineArgs("demo").create_engine_config().model_config.names == ("demo",)


def test_a_hub_token_stays_where_it_is_used() -> None:
    assert EngineArgs("demo", hf_token="hf_secret").create_engine_config().model_config.hf_token is None
