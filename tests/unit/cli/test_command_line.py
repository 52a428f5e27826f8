"""Parsing: every flag in every spelling, config files, suggestions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.command_line import CommandLine, Option, Positional
from quire.cli.option_groups import engine_args, engine_options, sampling_options
from quire.config.engine_args import FLAGS
from quire.config.flags import FlagSpec, parse_human_int
from quire.errors import ConfigError, ValidationError


def line(*extra: Option, positional: Positional | None = None) -> CommandLine:
    return CommandLine("quire test", "A test.", [*extra, *engine_options()], positional)


PROMPTS = Positional("prompt", "Text.", nargs="*")


def sample(spec: FlagSpec) -> tuple[str, Any]:
    """A text and the value it must give, other than the default."""
    if spec.choices:
        return spec.choices[-1], spec.choices[-1]
    if spec.metavar == "JSON":
        return '{"a": 1}', {"a": 1}
    low = spec.minimum if spec.minimum is not None and spec.minimum > 1 else 1
    if spec.parse in (int, parse_human_int):
        return str(int(low) + 2), int(low) + 2
    if spec.parse is float:
        value = max(0.25, (spec.minimum or 0) + 0.25)
        return str(value), value
    return "some text", "some text"


@pytest.fixture(scope="module")
def engine_line() -> CommandLine:
    return line()


@pytest.mark.parametrize("spec", FLAGS.values(), ids=FLAGS)
def test_every_flag_in_every_spelling(spec: FlagSpec, engine_line: CommandLine) -> None:
    dashes, underscores = spec.option, "--" + spec.name
    if spec.is_switch:
        spellings = {True: [[dashes], [underscores]], False: [["--no-" + dashes[2:]], ["--no_" + underscores[2:]]]}
        for value, variants in spellings.items():
            for argv in variants:
                assert engine_line.parse(argv)[spec.name] is value
        return
    text, value = sample(spec)
    held = [value] if spec.is_list else value
    for argv in ([dashes, text], [underscores, text], [f"{dashes}={text}"], [f"{underscores}={text}"]):
        args = engine_line.parse(argv)
        assert args[spec.name] == held
        assert args.given == {spec.name: held}
    assert getattr(engine_args(args), spec.name) == ((value,) if spec.is_list else value)


def test_nothing_given_is_every_default() -> None:
    args = line().parse([])
    assert args.given == {}
    defaults = {name: list(spec.default) if spec.is_list else spec.default for name, spec in FLAGS.items()}
    assert {name: args[name] for name in FLAGS} == defaults
    assert engine_args(args).non_default == {}


NUMBERS = {
    name: spec
    for name, spec in FLAGS.items()
    if spec.parse in (int, float, parse_human_int) and not spec.is_switch and not spec.choices
}


@given(st.data())
def test_numbers_survive_the_round_trip(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(list(NUMBERS.values())))
    low = int(spec.minimum) if spec.minimum is not None and spec.minimum >= 1 else 0
    high = spec.maximum if spec.maximum is not None else 2**40
    value: float = data.draw(
        st.floats(max(spec.minimum or 0, 0.01), high) if spec.parse is float else st.integers(low, int(high)),
        label=spec.name,
    )
    assert line().parse([f"{spec.option}={value!r}"])[spec.name] == value


@given(st.text(min_size=1).filter(lambda s: "\x00" not in s))
def test_texts_survive_the_round_trip(text: str) -> None:
    assert line().parse([f"--served-model-name={text}"])["served_model_name"] == text
    assert line(positional=PROMPTS).parse(["--", text])["prompt"] == [text]
    assert line(positional=Positional("one", "One.")).parse(["--", text])["one"] == text


@pytest.mark.parametrize(("text", "value"), [("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("auto", -1), ("77", 77)])
def test_a_number_may_have_a_unit(text: str, value: int) -> None:
    assert line().parse(["--max-model-len", text])["max_model_len"] == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq", "3"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--xyzzy=1"], "unknown flag --xyzzy; quire test --help=all lists them"),
        (["--max-num-seqs", "many"], "--max-num-seqs 'many' is not an integer"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 is below the minimum of 1"),
        (["--watermark", "x"], "--watermark 'x' is not a number"),
        (["--watermark", "nan"], "--watermark nan is not a finite number"),
        (["--max-model-len", "4q"], "--max-model-len: '4q' is not a number; write 4096"),
        (["--dtype", "int8"], "--dtype 'int8' is not one of auto, bfloat16"),
        (["--hf-overrides", "[1]"], "--hf-overrides: '[1]' is not a JSON object"),
        (["--max-num-seqs"], "--max-num-seqs: expected one argument; see quire test --help"),
        (["stray"], "unexpected argument 'stray'"),
        (["--", "--stray"], "unexpected argument '--stray'"),
        (["--hf-overrides.a"], "--hf-overrides.a needs a value"),
        (["--hf-overrides.a=1", "--hf-overrides.a.b=2"], "goes into 'a', which holds 1"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        line().parse(argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_abbreviated_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean --block-size"):
        line().parse(["--block-siz", "4"])


def test_positionals_and_flags_may_be_mixed() -> None:
    args = line(positional=PROMPTS).parse(["a", "--max-num-seqs", "3", "b", "-", "--", "--c_d"])
    assert args["prompt"] == ["a", "b", "-", "--c_d"]
    assert args["max_num_seqs"] == 3
    assert line(positional=PROMPTS).parse([])["prompt"] == []


def test_the_last_one_wins_and_repeatables_add_up() -> None:
    stop = Option(name="stop", help="", is_repeatable=True)
    args = line(stop).parse(["--stop", "a", "--max-num-seqs=1", "--stop=b", "--max-num-seqs=2"])
    assert (args["stop"], args["max_num_seqs"]) == (["a", "b"], 2)


def test_dotted_flags_are_merged_into_one_object() -> None:
    argv = ["--hf-overrides.a.b", "1", "--hf_overrides", '{"c": [2]}', "--hf_overrides.rope_theta=x", "--seed", "3"]
    args = line().parse(argv)
    assert args["hf_overrides"] == {"a": {"b": 1}, "c": [2], "rope_theta": "x"}
    assert args["seed"] == 3


# -- config files -------------------------------------------------------------------------------------------------


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def test_config_file_fills_in_and_the_command_line_wins(tmp_path: Path) -> None:
    stop = Option(name="stop", help="", is_repeatable=True)
    content = {
        "max-num-seqs": 7,
        "max_model_len": "4k",
        "enable-prefix-caching": False,
        "watermark": 0.5,
        "hf-overrides": {"a": {"b": 1}},
        "stop": ["x", "y"],
        "seed": None,
    }
    path = write(tmp_path / "c.yaml", content)
    args = line(stop).parse(["--config", path])
    assert args.given == {
        "config": path,
        "max_num_seqs": 7,
        "max_model_len": 4000,
        "enable_prefix_caching": False,
        "watermark": 0.5,
        "hf_overrides": {"a": {"b": 1}},
        "stop": ["x", "y"],
    }
    args = line(stop).parse(["--stop=z", "--enable-prefix-caching", f"--config={path}", "--max-num-seqs", "9"])
    assert (args["stop"], args["enable_prefix_caching"], args["max_num_seqs"], args["watermark"]) == (
        ["z"], True, 9, 0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-num-seq: 3", "unknown key 'max-num-seq'; did you mean max-num-seqs?"),
        ("config: other.yaml", "unknown key 'config'"),
        ("max-num-seqs: many", "--max-num-seqs 'many' is not an integer"),
        ("max-num-seqs: [1, 2]", "--max-num-seqs '[1, 2]' is not an integer"),
        ("enable-prefix-caching: maybe", "--enable-prefix-caching 'maybe' is not true or false"),
        ("[1, 2]", "holds a list, not a map"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_config_file_mistakes_name_the_file(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "c.yaml", content)
    with pytest.raises(ConfigError) as caught:
        line().parse(["--config", path])
    assert message in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_file_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        line().parse(["--config", str(tmp_path / "none.yaml")])
    assert line().parse(["--config", write(tmp_path / "empty.yaml", "# nothing\n")])["max_num_seqs"] is None


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_num_seqs": st.integers(1, 10**6),
            "watermark": st.floats(0, 0.9),
            "enable_prefix_caching": st.booleans(),
            "served_model_name": st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
        },
    )
)
def test_a_flag_means_the_same_in_a_file_and_on_the_command_line(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")  # JSON is YAML
    argv = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        argv.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    from_file = line().parse(["--config", str(path)]).given
    del from_file["config"]
    assert from_file == line().parse(argv).given == values


def test_sampling_flags_are_checked_when_they_are_read() -> None:
    command = CommandLine("quire test", "", sampling_options())
    flags = ["--top-p", "0.5", "--stop", "x", "--stop_token_ids", "7", "--no-skip-special-tokens"]
    args = command.parse([*flags, "--logit-bias", '{"5": -1}', "--logit-bias.6=2.5"])
    assert args.given == {
        "top_p": 0.5,
        "stop": ["x"],
        "stop_token_ids": [7],
        "skip_special_tokens": False,
        "logit_bias": {"5": -1, "6": 2.5},
    }
    with pytest.raises(ValidationError, match=r"top_p must be in \(0, 1\], got 1.5"):
        command.parse(["--top-p", "1.5"])
