"""Modules under vLLM's names (quire/vllm_names.py)."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from quire.resolve import resolve
from quire.vllm_names import MODULES, PROGRAMS


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_table_is_the_object_it_stands_for(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__all__ == list(MODULES[module])
    for name, source in MODULES[module].items():
        target = source if ":" in source else f"{source}:{name}"
        assert getattr(found, name) is resolve(target)


def test_import_statements_of_programs_work_in_each_form() -> None:
    code = (
        "from quire.v1.engine.async_llm import AsyncLLM\n"
        "import quire.engine.arg_utils, quire.entrypoints.llm as m\n"
        "from quire.engine.core import EngineCore\n"
        "print(m.LLM.__module__, quire.engine.arg_utils.EngineArgs.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["quire.frontend.llm", "EngineArgs"]


def test_names_that_vllm_had_earlier_are_there() -> None:
    from quire.sampling_params import BeamSearchParams, GuidedDecodingParams, SamplingParams, StructuredOutputsParams

    assert GuidedDecodingParams is StructuredOutputsParams
    guided = GuidedDecodingParams(choice=["a"])
    assert SamplingParams(structured_outputs=guided) == SamplingParams(n=1, guided_decoding=guided)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no field 'guided_decoding'"):
        SamplingParams(guided_decoding=guided, structured_outputs=guided)  # type: ignore[call-arg]
    assert BeamSearchParams(beam_width=2, max_tokens=3).beam_width == 2


def test_what_is_not_in_the_table_is_named_in_the_error() -> None:
    with pytest.raises(ImportError, match="Nothing"):
        importlib.import_module("quire.entrypoints.Nothing")
    module = importlib.import_module("quire.engine.arg_utils")
    with pytest.raises(AttributeError, match=r"no attribute 'EngineArg'; it has EngineArgs, AsyncEngineArgs"):
        module.EngineArg  # noqa: B018
    with pytest.raises(AttributeError, match="for the modules in it"):
        importlib.import_module("quire.v1").engines  # noqa: B018


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_table_starts_with_python_m(program: str) -> None:
    run = subprocess.run([sys.executable, "-m", program, "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert f"usage: {' '.join(['quire', *PROGRAMS[program]])}" in run.stdout.lower()


def test_a_module_that_is_no_program_says_so() -> None:
    run = subprocess.run([sys.executable, "-m", "quire.logprobs"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "quire.logprobs is not a program" in run.stderr
