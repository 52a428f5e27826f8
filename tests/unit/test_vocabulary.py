"""errors, envs, logger and resolve."""

from __future__ import annotations

import logging

import pytest

import quire.errors as errors
from quire import envs
from quire.errors import ConfigError, QuireError, ValidationError
from quire.logger import child_level, init_logger
from quire.resolve import resolve


def _tree_names() -> set[str]:
    text = errors.__doc__ or ""
    return {word for word in text.replace("│", " ").replace("├──", " ").replace("└──", " ").split() if "Error" in word}


def _classes() -> dict[str, type[QuireError]]:
    return {n: v for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, QuireError)}


def test_the_drawn_tree_is_the_real_one() -> None:
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, QuireError)
    }
    assert classes <= _tree_names()


def test_each_error_has_its_status_code() -> None:
    codes = {name: value.status_code for name, value in _classes().items()}
    assert codes["ValidationError"] == codes["PromptTooLongError"] == 400
    assert codes["NotFoundError"] == 404
    assert codes["OverloadedError"] == 503
    assert codes["GenerationError"] == codes["EngineDeadError"] == 500


def test_validation_errors_are_value_errors() -> None:
    error = ValidationError("n=0", param="n", value=0)
    assert isinstance(error, ValueError)
    assert (error.param, error.value) == ("n", 0)


def test_env_reads_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CPU_KVCACHE_SPACE", raising=False)
    assert envs.CPU_KVCACHE_SPACE.number() == 0
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "1.5")
    assert envs.CPU_KVCACHE_SPACE.number() == 1.5
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "lots")
    with pytest.raises(ConfigError, match="QUIRE_CPU_KVCACHE_SPACE='lots' is not a number"):
        envs.CPU_KVCACHE_SPACE.number()


def test_vllms_name_of_a_variable_is_read_where_ours_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert not envs.API_KEY.is_set
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert envs.API_KEY.is_set
    assert envs.API_KEY.get() == "theirs"
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    assert envs.API_KEY.get() == "ours"


@pytest.mark.parametrize(("text", "on"), [("1", True), ("yes", True), ("TRUE", True), ("0", False), ("", False)])
def test_a_switch_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv("QUIRE_COMPUTE_NANS_IN_LOGITS", text)
    assert envs.COMPUTE_NANS_IN_LOGITS.flag() is on


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    envs.check_environment()
    monkeypatch.setenv("QUIRE_LOGING_LEVEL", "DEBUG")
    with pytest.raises(ConfigError, match="did you mean QUIRE_LOGGING_LEVEL"):
        envs.check_environment()


def test_env_table_is_complete() -> None:
    assert len({v.name for v in envs.ENV_VARS}) == len(envs.ENV_VARS) >= 5
    assert all(v.name.startswith("QUIRE_") and v.help for v in envs.ENV_VARS)


def test_loggers_are_children_of_quire() -> None:
    logger = init_logger("quire.some.module")
    assert logger.name == "quire.some.module"
    assert logging.getLogger("quire").level != logging.NOTSET


@pytest.mark.parametrize(("level", "name"), [(logging.WARNING, "WARNING"), (logging.DEBUG, "DEBUG"), (31, "WARNING")])
def test_a_child_logs_at_the_level_of_its_parent(level: int, name: str) -> None:
    root = logging.getLogger("quire")
    before = root.level
    root.setLevel(level)
    try:
        assert child_level() == name
    finally:
        root.setLevel(before)


def test_a_dotted_name_is_resolved_or_refused_with_the_reason() -> None:
    assert resolve("quire.errors:ConfigError") is ConfigError
    for name, message in {
        "quire.errors": "does not name an object",
        "quire.errors:Nope": "has no 'Nope'",
        "quire.nope:X": "no module 'quire.nope'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resolve(name)
