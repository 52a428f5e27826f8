"""The configuration of adapters, and adapters as an operator names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.engine_args import EngineArgs
from quire.config.lora import AdapterSpec, LoRAConfig, parse_lora_module, resolve_adapter_dir
from quire.errors import ConfigError, NotFoundError


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("sql=/adapters/sql", AdapterSpec("sql", "/adapters/sql")),
        ("team/sql=~/a=b", AdapterSpec("team/sql", "~/a=b")),
        ('{"name": "sql", "path": "/a"}', AdapterSpec("sql", "/a")),
        (
            '{"name": "sql", "path": "/a", "base_model_name": "m", "is_3d_lora_weight": true, '
            '"chat_template": "adapter"}',
            AdapterSpec("sql", "/a", "m", "adapter", is_3d_lora_weight=True),
        ),
    ],
)
def test_items_of_lora_modules(text: str, spec: AdapterSpec) -> None:
    assert parse_lora_module(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sql", "is neither NAME=PATH nor a JSON object with name and path"),
        ("=/adapters/sql", "needs a name and a path"),
        ("sql=", "needs a name and a path"),
        ('{"name": "sql"}', "missing required field `path`"),
        ('{"name": "sql", "path": "/a", "rank": 3}', "unknown field `rank`"),
        ('{"name": 5, "path": "/a"}', "Expected `str`"),
    ],
)
def test_items_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"--lora-modules .*" + message):
        parse_lora_module(text)


def test_a_directory_of_adapters_enables_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "link").symlink_to("adapters")
    settled = LoRAConfig(lora_dir=(str(tmp_path / "link"), str(tmp_path / "adapters"))).settle()
    assert settled == LoRAConfig(enable_lora=True, lora_dir=(str(tmp_path / "adapters"),))
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    assert LoRAConfig(enable_lora=True).settle().lora_dir == (str(tmp_path),)
    assert LoRAConfig().settle() == LoRAConfig()  # a variable of the shell does not enable them
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        LoRAConfig(lora_dir=(str(tmp_path / "nowhere"),)).settle()


def test_bounds_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--max-cpu-loras 2 is below --max-loras 4"):
        LoRAConfig(enable_lora=True, max_loras=4, max_cpu_loras=2).settle()
    assert LoRAConfig(enable_lora=True, max_cpu_loras=1).settle().max_cpu_loras == 1


def test_flags_without_the_switch_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineArgs("demo", max_loras=4).create_engine_config()
    assert not config.lora_config.enable_lora
    assert "no effect without --enable-lora" in caplog.text


def test_directories_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_adapter_dir("a") == resolve_adapter_dir("~/a") == tmp_path / "a"
    for path, message in (
        ("file", "is a file; give the directory"),
        ("/no/where", "no such directory"),
        ("nowhere", "no such directory"),  # no hub id: it has no owner
    ):
        with pytest.raises(NotFoundError, match=message) as caught:
            resolve_adapter_dir(path)
        assert caught.value.param == "lora_path"
