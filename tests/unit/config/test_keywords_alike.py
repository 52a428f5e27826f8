"""One table of arguments, which `LLM`, `EngineArgs`, `AsyncEngineArgs`, their parser and `quire serve` take alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.cli.flexible_parser import FlexibleArgumentParser
from quire.cli.option_groups import engine_args
from quire.cli.serve import command_line
from quire.config.engine_args import FLAGS, AsyncEngineArgs, EngineArgs
from quire.errors import ConfigError
from quire.frontend.llm import LLM
from quire.frontend.llm_engine import LLMEngine

TAKEN: list[tuple[str, Any, dict[str, Any]]] = [
    ("max_model_len", 4096, {"max_model_len": 4096}),
    ("max_model_len", "4k", {"max_model_len": 4000}),
    ("max_num_seqs", "8", {"max_num_seqs": 8}),
    ("gpu_memory_utilization", 1, {"gpu_memory_utilization": 1.0}),
    ("enable_prefix_caching", False, {"enable_prefix_caching": False}),
    ("served_model_name", ["a", "b"], {"served_model_name": ["a", "b"]}),
    ("hf_overrides", {"a": [1]}, {"hf_overrides": {"a": [1]}}),
    ("dtype", "half", {"dtype": "half"}),
    ("block_size", 16, {}),
    # vLLM's, at a value that asks for nothing, or without effect
    ("enforce_eager", True, {}),
    ("tensor_parallel_size", 1, {}),
    ("tensor_parallel_size", "3", {"tensor_parallel_size": 3}),
    ("prefill_context_parallel_size", 1, {}),
    ("trust_remote_code", True, {}),
    ("swap_space", 4, {}),
    ("enable_lora", False, {}),
    ("enable_lora", True, {"enable_lora": True}),
    ("lora_target_modules", ["q_proj", "v_proj"], {"lora_target_modules": ("q_proj", "v_proj")}),
    ("compilation_config", {"level": 3}, {}),
    ("limit_mm_per_prompt", {"image": 1}, {}),
    ("disable_log_requests", True, {}),
    ("disable_async_output_proc", True, {}),
    ("speculative_config", {"method": "ngram"}, {"speculative_config": {"method": "ngram"}}),
    # vLLM's by another name here
    ("task", "embed", {"runner": "pooling", "convert": "embed"}),
    ("task", "score", {"runner": "pooling"}),
    ("override_pooler_config", {"pooling_type": "MEAN"}, {"pooler_config": {"pooling_type": "MEAN"}}),
    ("structured_outputs_config", {"backend": "guidance"}, {"grammar_backend": "guidance"}),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("max_num_seqs", 0, "below the minimum of 1"),
    ("max_num_seqs", "many", "is not an integer"),
    ("max_num_seqs", 8.5, "is not an integer"),
    ("max_model_len", "long", "write 4096, 4k"),
    ("gpu_memory_utilization", "x", "is not a number"),
    ("dtype", "int3", "is not one of auto, bfloat16"),
    ("hf_overrides", "a", "is not a JSON object"),
    ("task", "sing", "is not one of auto, generate"),
    ("tensor_parallel_size", 0, "below the minimum of 1"),
    ("prefill_context_parallel_size", 2, "not supported: the tokens of a context"),
    ("enable_tower_connector_lora", True, "not supported: there are no multimodal models"),
    ("max_num_seq", 8, r"did you mean \W*max.num.seqs"),
    ("tensor_paralel_size", 2, r"did you mean \W*tensor.parallel.size"),
    ("enforce_eagre", True, r"did you mean \W*enforce.eager"),
    ("no_such_argument_at_all", 1, r"lists them"),
]


def words_of(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list):
        return [f"--{flag}", *value]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


def llm(name: str, value: Any) -> EngineArgs:
    caught: list[EngineArgs] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "from_engine_args", caught.append)
        patch.setattr("quire.frontend.llm.BatchRunner", lambda engine: None)
        LLM(**{name: value}, disable_log_stats=False)
    return caught[0]


def parser(name: str, value: Any) -> EngineArgs:
    args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words_of(name, value))
    return AsyncEngineArgs.from_cli_args(args)


def attribute(name: str, value: Any) -> EngineArgs:
    args = EngineArgs()
    setattr(args, name, value)
    return args


DOORS: dict[str, Callable[[str, Any], EngineArgs]] = {
    "LLM": llm,
    "EngineArgs": lambda name, value: EngineArgs(**{name: value}),
    "AsyncEngineArgs": lambda name, value: AsyncEngineArgs(**{name: value}),
    "attribute": attribute,
    "from_cli_args": parser,
    "serve": lambda name, value: engine_args(command_line().parse(["--model=demo", *words_of(name, value)])),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_argument_is_taken_alike_by_every_door(door: str) -> None:
    for name, value, flags in TAKEN:
        assert DOORS[door](name, value).non_default == flags, name


@pytest.mark.parametrize("door", DOORS)
def test_an_argument_is_refused_alike_by_every_door(door: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value, message in REFUSED:
        with pytest.raises((ConfigError, SystemExit)) as end:
            DOORS[door](name, value)
        said = str(end.value) if isinstance(end.value, ConfigError) else capsys.readouterr().err
        assert re.search(message, said), (name, said)


def test_every_flag_takes_its_default_and_none() -> None:
    given = {name: list(spec.default) if spec.is_list else spec.default for name, spec in FLAGS.items()}
    assert EngineArgs(**given).non_default == {}
    assert EngineArgs(**dict.fromkeys(FLAGS)).non_default == {}


def test_values_that_only_python_has() -> None:
    assert EngineArgs(dtype=torch.bfloat16).dtype == "bfloat16"
    assert EngineArgs(hf_token=True).hf_token is None
    with pytest.raises(ConfigError, match="--enable-prefix-caching 'yes' is not True or False"):
        EngineArgs(enable_prefix_caching="yes")
    with pytest.raises(ConfigError, match="'port' is no argument of the engine: it is a flag of `quire serve`"):
        EngineArgs(port=8000)
