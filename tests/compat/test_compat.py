"""docs/compat.md, its tables, and the program they speak of: held together."""

from __future__ import annotations

import logging
import re
import tomllib
from typing import Any

import msgspec
import pytest
from tools.compat.verdicts import (
    all_endpoints,
    endpoints,
    field_verdicts,
    flag_verdict,
    http_table,
    own_options,
    route_verdict,
)

from quire.cli.main import format_help
from quire.cli.serve import command_line
from quire.config.model import ASSETS_DIR
from quire.config.vllm_flags import VllmFlag, settle_vllm_flags, vllm_flags
from quire.errors import ConfigError
from quire.frontend.http.openapi import make_openapi

FLAGS = vllm_flags()
FOREIGN = {name: flag for name, flag in FLAGS.items() if flag.option not in own_options()}
TABLE = http_table()


def test_the_tables_hold_all_names() -> None:
    """The table has as many rows as the OpenAPI document, the route table and --help of vLLM 0.32."""
    assert len(TABLE["route"]) == 78
    assert len(TABLE["request"]) == 26
    assert sum(len(row["fields"]) for row in TABLE["request"].values()) == 353
    assert sum(flag.group != "Former" for flag in FLAGS.values()) == 316


def test_the_tables_have_no_key_that_nobody_reads() -> None:
    route_keys = {"path", "methods", "requests", "needs", "different", "why"}
    request_keys = {"route", "struct", "read_by", "passed", "fields", "different", "why"}
    flag_keys = {"default", "choices", "switch", "many", "short", "silent", "ignored", "refused"}
    assert {key for row in TABLE["route"] for key in row} <= route_keys
    for name, row in TABLE["request"].items():
        assert set(row) <= request_keys
        assert len(row.keys() & {"route", "struct", "read_by", "passed"}) == 1
        assert {*row.get("why", {}), *row.get("different", {})} <= set(row["fields"]), name
    groups = tomllib.loads((ASSETS_DIR / "vllm_flags.toml").read_text(encoding="utf-8"))
    assert {key for rows in groups.values() for row in rows.values() for key in row} <= flag_keys


def test_requests_of_a_route_are_those_of_the_table() -> None:
    named = {name: row["path"] for row in TABLE["route"] for name in row.get("requests", ())}
    assert named == {name: row["route"] for name, row in TABLE["request"].items() if "route" in row}


def test_a_route_is_served_as_its_row_says() -> None:
    """A route that is there is in the OpenAPI document that is served; one that is not, is not."""
    document = make_openapi(all_endpoints())
    for row in TABLE["route"]:
        served = {method.upper() for method in document["paths"].get(row["path"], {})}
        verdict = route_verdict(row)
        assert (verdict.word == "not") == (not served), row
        assert verdict.note or served >= set(row["methods"]), row
        assert verdict.note or verdict.word == "yes"


@pytest.mark.parametrize("name", TABLE["request"])
def test_a_field_is_taken_as_its_row_says(name: str) -> None:
    """A field that is there is one of its body in the OpenAPI document."""
    row = TABLE["request"][name]
    endpoint = endpoints().get(row.get("route", ""))
    verdicts = field_verdicts(name)
    assert [v.name for v in verdicts] == row["fields"]
    assert all(v.note for v in verdicts if v.word != "yes")
    if endpoint is None or endpoint.body is None:
        return
    schema = msgspec.json.schema_components([endpoint.body.kind])[1][endpoint.body.kind.__name__]
    assert {v.name for v in verdicts if v.word != "not"} <= set(schema["properties"])


def test_a_flag_is_taken_as_its_row_says() -> None:
    """A flag that is there is in --help, and any other says what becomes of it."""
    listed = set(re.findall(r"--[a-z0-9-]+", format_help(command_line(), "all")))
    for flag in FLAGS.values():
        verdict = flag_verdict(flag)
        assert verdict.note or verdict.word == "yes"
        assert (flag.option in listed) == (flag.option in own_options())
        if flag.option not in listed:
            assert verdict.word != "yes"
            assert bool(flag.ignored) != bool(flag.refused), flag


def words(flag: VllmFlag, value: Any) -> list[str]:
    """A command line with it."""
    if flag.is_switch:
        return [flag.option if value else "--no-" + flag.option[2:]]
    texts = value if isinstance(value, list) and flag.takes_many else [value]
    encoded = [text if isinstance(text, str) else msgspec.json.encode(text).decode() for text in texts]
    return [flag.option, *encoded] if encoded else []


def another(flag: VllmFlag) -> Any:
    """A value that asks for something; None if there is none."""
    if flag.is_switch:
        return next((v for v in (True, False) if v != bool(flag.default) and v not in flag.silent), None)
    if flag.name == "structured_outputs_config":
        return {"backend": "outlines"}
    if flag.name.endswith("_config"):
        return {"x": 1}
    if flag.choices:
        return next(c for c in flag.choices if c != flag.default)
    return {"guided_decoding_backend": "outlines", "task": "embed"}.get(flag.name, "77")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    return caplog


def test_flags_that_ask_for_nothing_are_taken_without_a_word(warnings: pytest.LogCaptureFixture) -> None:
    """vLLM's whole command line, at its defaults."""
    argv = [word for flag in FOREIGN.values() if flag.default is not None for word in words(flag, flag.default)]
    assert len(argv) > 170
    assert command_line().parse(["m", *argv]).given == {"model_name": "m"}
    argv = [word for flag in FOREIGN.values() for value in flag.silent for word in words(flag, value)]
    assert command_line().parse(["m", *argv]).given == {"model_name": "m"}
    assert not warnings.records


def test_a_flag_without_effect_is_warned_of_and_another_refused(warnings: pytest.LogCaptureFixture) -> None:
    for flag in FOREIGN.values():
        value = another(flag)
        warnings.clear()
        if flag.refused:
            with pytest.raises(ConfigError, match=flag.option + ".* is not supported"):
                settle_vllm_flags({flag.name: value})
        elif value is not None:
            settle_vllm_flags({flag.name: value})
            assert len(warnings.records) == 1, flag
