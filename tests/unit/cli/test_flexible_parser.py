"""The argument parser of programs written for vLLM."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.cli.flexible_parser import FlexibleArgumentParser
from quire.config.engine_args import FLAGS, EngineArgs
from quire.errors import ConfigError


def parse(*words: str, **defaults: Any) -> argparse.Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(**defaults)
    return parser.parse_args(words)


def test_nothing_given_are_the_defaults() -> None:
    args = EngineArgs.from_cli_args(parse())
    assert args.non_default == {}
    assert EngineArgs(**vars(parse())).non_default == {}, "and so they are as keywords"


def test_flags_may_be_written_with_underscores_or_dashes() -> None:
    args = EngineArgs.from_cli_args(parse("--max_num_seqs", "8", "--max-model-len=1k", "--no-enable_prefix_caching"))
    assert args.non_default == {"max_num_seqs": 8, "max_model_len": 1000, "enable_prefix_caching": False}


def test_a_program_may_set_defaults_and_add_arguments_of_its_own() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="mine"))
    parser.set_defaults(model="demo")
    parser.add_argument_group("Sampling").add_argument("--top-p", type=float)
    args = parser.parse_args(["--top_p", "0.5"])
    assert args.top_p == 0.5
    assert EngineArgs.from_cli_args(args).non_default == EngineArgs("demo").non_default


def test_flags_with_several_values() -> None:
    assert parse("--served-model-name", "a", "b").served_model_name == ["a", "b"]
    assert parse("--served-model-name", "a").served_model_name == "a"


def test_objects_may_be_json_or_keys_after_dots() -> None:
    assert parse("--hf-overrides.rope.factor", "2", "--hf_overrides.x=[1]").hf_overrides == {
        "rope": {"factor": 2},
        "x": [1],
    }
    assert parse("--hf-overrides", '{"a": 1}').hf_overrides == {"a": 1}


def test_a_config_file_fills_in_what_the_command_line_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("max_num_seqs: 4\nmax-model-len: 512\nenable-prefix-caching: false\n", encoding="utf-8")
    args = EngineArgs.from_cli_args(parse("--config", str(path), "--max-num-seqs", "8"))
    assert args.non_default == {"max_num_seqs": 8, "max_model_len": 512, "enable_prefix_caching": False}


def test_flags_of_vllm_are_taken_as_quire_serve_takes_them() -> None:
    assert EngineArgs.from_cli_args(parse("--enforce-eager", "--max-num-seqs", "2")).non_default["max_num_seqs"] == 2
    with pytest.raises(ConfigError, match="prefill_context_parallel_size"):
        EngineArgs.from_cli_args(parse("--prefill-context-parallel-size", "2"))


@pytest.mark.parametrize("words", [["--max-num-seqs", "x"], ["--max-num-seqs", "0"], ["--dtype", "int3"], ["--nope"]])
def test_a_bad_value_ends_the_program_with_the_flag_and_the_reason(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*words)
    assert end.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_an_unknown_flag_is_answered_with_the_nearest(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse("--max-num-seq=3")
    assert "unrecognized arguments: --max-num-seq=3; did you mean --max-num-seqs?" in capsys.readouterr().err


def test_an_ordinary_parser_works_as_well() -> None:
    args = EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(["--max-num-seqs", "3"])
    assert EngineArgs.from_cli_args(args).non_default == {"max_num_seqs": 3}


def test_asdict_gives_the_keywords_of_an_llm() -> None:
    keywords = dataclasses.asdict(EngineArgs("demo", max_num_seqs=3))
    assert keywords.keys() == FLAGS.keys()
    assert EngineArgs(**keywords).non_default == EngineArgs("demo", max_num_seqs=3).non_default
