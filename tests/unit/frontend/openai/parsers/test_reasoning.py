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
    ("gemma4", "", "<|channel>thought\nHm.<channel|>Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("gemma4", "", "<|channel>thought\n<channel|>Hi", [("content", "Hi")]),
    ("gemma4", "<|turn>model\n<|channel>thought\n", "Hm.<channel|>Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Hi", [("content", "Hi")]),
    ("gemma4", "", "<|channel>thought\nHm.<|tool_call>x", [("reasoning", "Hm."), ("content", "<|tool_call>x")]),
    ("gemma4", "", "Hi <|channel>thought", [("content", "Hi <|channel>thought")]),
    (
        "ernie45",
        OPEN_PROMPT,
        "Hm.\n</think>\n\n<response>\nHi\nyou\n</response>\n",
        [("reasoning", "Hm.\n"), ("content", "Hi\nyou")],
    ),
    ("ernie45", SHUT_PROMPT, "<response>\nHi\n", [("content", "Hi\n")]),
    ("ernie45", OPEN_PROMPT, "Hm.</think>\n\n<tool_call>{}", [("reasoning", "Hm."), ("content", "\n\n<tool_call>{}")]),
    ("ernie45", SHUT_PROMPT, "A<response>B</response>", [("content", "A<response>B</response>")]),
    (
        "hunyuan_a13b",
        "",
        "<think>\nHm.\n</think>\n<answer>\nHi\n</answer> x",
        [("reasoning", "\nHm.\n"), ("content", "Hi x")],
    ),
    ("hunyuan_a13b", "", "<answer>\nH\n\ni", [("content", "H\n\ni")]),
    (
        "cohere_command",
        "",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>",
        [("reasoning", "Hm."), ("content", "Hi")],
    ),
    (
        "cohere_command",
        "",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[]",
        [("reasoning", "Hm."), ("content", "<|START_ACTION|>[]")],
    ),
    ("cohere_command", "", "<|START_RESPONSE|>Hi<|END_RESP", [("content", "Hi<|END_RESP")]),
    ("apertus", "", "<|inner_prefix|>Hm.<|inner_suffix|>Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    ("granite", "", "Here is my thought process:Hm.Here is my response:Hi", [("reasoning", "Hm."), ("content", "Hi")]),
    (
        "kimi_k2",
        "",
        "<think>Hm.<|tool_calls_section_begin|>x",
        [("reasoning", "Hm."), ("content", "<|tool_calls_section_begin|>x")],
    ),
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
    tags = REASONING_PARSERS[name].tags
    if tags is not None:
        dropped = sum(map(len, (tags.open, tags.label, tags.close, tags.answer, tags.answer_end)))
        assert len(text) - len(all_text(whole)) <= dropped + text.count(" ") + text.count("\n")


def test_work_grows_no_faster_than_the_text() -> None:
    for name, spec in REASONING_PARSERS.items():
        for unit in ("</think", "<think>", " ", "<|channel|>analysis<|message|>", "<response>\n"):
            small, large = (count_work(spec.make_program(""), split(unit * n, 3)) for n in (30, 60))
            assert large <= 2.2 * small + 2000, (name, unit)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="qwen3"):
        reasoning_parser("qwen9")
