"""Every reasoning parser: what it makes of its texts, however they are cut and whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.frontend.openai.parsers.reasoning import REASONING_PARSERS, reasoning_parser
from tests.seeds import examples

from ..reading import Summary, all_text, count_work, read, split
from .texts import PIECES

OPEN_PROMPT = "<|im_start|>assistant\n<think>\n"
SHUT_PROMPT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

CASES: list[tuple[str, str, str, Summary]] = [
    ("qwen3", "", "<think>\nHm.\n</think>\n\nHi", [("reasoning", "\nHm.\n"), ("content", "\n\nHi")]),
    ("qwen3", "", "Hi <think>", [("content", "Hi <think>")]),
    ("qwen3", "", " <think>Hm", [("reasoning", "Hm")]),
    ("qwen3", "", "<thi", [("content", "<thi")]),
    ("qwen3", "", "<think></think>Hi</think>", [("content", "Hi</think>")]),
    (
        "qwen3",
        "",
        "<think>Hm. <tool_call>{}</tool_call>",
        [("reasoning", "Hm. "), ("content", "<tool_call>{}</tool_call>")],
    ),
    ("qwen3", "", "<think>A <tool_call></think>B", [("reasoning", "A <tool_call>"), ("content", "B")]),
    ("qwen3", OPEN_PROMPT, "Hm.<tool_call>{}", [("reasoning", "Hm."), ("content", "<tool_call>{}")]),
    ("qwen3", OPEN_PROMPT, "Hm.<tool_cal", [("reasoning", "Hm.<tool_cal")]),
    ("deepseek_r1", "", "Hm.<tool_call>{}", [("reasoning", "Hm.<tool_call>{}")]),
    ("qwen3", OPEN_PROMPT, "Hm.</think>Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("qwen3", SHUT_PROMPT, "Hi", [("content", "Hi")]),
    ("deepseek_r1", "", "Hm.</think>Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("deepseek_r1", "", "\n<think>Hm.</think>Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("deepseek_r1", "", "\nHm. </thin", [("reasoning", "\nHm. </thin")]),
    ("deepseek_r1", SHUT_PROMPT, "Hi", [("content", "Hi")]),
    ("mistral", "", "[THINK]Hm.[/THINK]Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>Hm.<|end|>", [("reasoning", "Hm.")]),
]


@pytest.mark.parametrize(("name", "prompt", "text", "meaning"), CASES)
def test_a_text_means_the_same_however_it_is_cut(name: str, prompt: str, text: str, meaning: Summary) -> None:
    program = REASONING_PARSERS[name].make_program(prompt)
    for size in (1, 2, 3, 7, 100):
        assert read(program, split(text, size), trims=False) == meaning


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
@settings(max_examples=examples(40))
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join), size=st.integers(1, 9))
def test_hostile_text_means_the_same_however_it_is_cut(name: str, text: str, size: int) -> None:
    program = REASONING_PARSERS[name].make_program("")
    whole = read(program, [text], trims=False)
    assert read(program, split(text, size), trims=False) == whole
    if name != "openai_gptoss":
        assert len(text) - len(all_text(whole)) <= len("<think></think>") + text.count(" ") + text.count("\n")


def test_work_grows_no_faster_than_the_text() -> None:
    for name, spec in REASONING_PARSERS.items():
        for unit in ("</think", "<think>", " ", "<|channel|>analysis<|message|>"):
            small, large = (count_work(spec.make_program(""), split(unit * n, 3)) for n in (200, 400))
            assert large <= 2.2 * small + 2000, (name, unit)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="qwen3"):
        reasoning_parser("qwen9")
