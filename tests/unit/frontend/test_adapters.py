"""Adapters in the frontend: their check, their ids, the directories they are found in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.engine_args import EngineArgs
from quire.config.lora import AdapterSpec, LoRAConfig
from quire.errors import AdapterError, ClientError, NotFoundError, ValidationError
from quire.frontend.adapters import (
    AdapterDirs,
    AdapterDoor,
    AdapterRegistry,
    AdapterTable,
    RemoteTable,
    ServedAdapter,
    answer_peer,
    load_modules,
    make_door,
    read_template,
    scan,
)
from quire.lora_request import LoRARequest
from tests.adapters import write_adapter

ENABLED = LoRAConfig(enable_lora=True)


class Core:
    """The engine core as a table calls it: it keeps the calls, and fails if `error` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def call(self, *call: Any) -> None:
        self.calls.append(call)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error


def run(test: Callable[[Core, AdapterTable], Coroutine[Any, Any, None]], config: LoRAConfig = ENABLED) -> None:
    async def main() -> None:
        core = Core()
        await test(core, AdapterTable(AdapterDoor(config), core.call, ["demo"]))

    asyncio.run(main())


# -- the door ---------------------------------------------------------------------------------------------------------


def test_the_files_of_an_adapter_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    checked: list[Path] = []
    door = AdapterDoor(ENABLED, checked.append)
    asked = LoRARequest("sql", 1, "a")
    assert not door.knows(asked)
    found = door.check(asked)
    assert (found.lora_path, found.lora_int_id) == (str(tmp_path / "a"), 1)
    assert door.knows(asked)
    assert door.knows(found)
    assert door.check(found) is door.check(asked)
    assert checked == [tmp_path / "a"]
    door.check_again(asked)
    door.check(LoRARequest("sql", 2, "a"))
    assert len(checked) == 3


def test_a_bad_adapter_is_refused_at_every_use(tmp_path: Path) -> None:
    door = make_door(EngineArgs("demo", enable_lora=True, max_lora_rank=8).create_engine_config())
    for content, message in (({"r": 16}, "max-lora-rank is 8"), ({"peft_type": "IA3"}, "peft_type")):
        directory = write_adapter(tmp_path / message, **content)
        for _ in range(2):
            with pytest.raises(AdapterError, match=message) as caught:
                door.check(LoRARequest("bad", 1, str(directory)))
            assert (caught.value.status_code, caught.value.param) == (400, "lora_path")


@pytest.mark.parametrize(
    ("lora", "error", "message"),
    [
        (LoRARequest("a", 1), ValidationError, "adapter 'a' has no path"),
        (LoRARequest("a", 1, "/no/where"), NotFoundError, "there is no adapter at /no/where"),
        ("sql", ValidationError, "lora_request must be a LoRARequest, got str"),
    ],
)
def test_requests_without_an_adapter(lora: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AdapterDoor(ENABLED).check(lora)


def test_the_door_is_closed_without_the_switch(tmp_path: Path) -> None:
    door = AdapterDoor(LoRAConfig())
    lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "a")))
    assert door.knows(lora)  # nothing is read for it
    with pytest.raises(ValidationError, match="without adapters; start it with --enable-lora"):
        door.check(lora)


# -- the table --------------------------------------------------------------------------------------------------------


def test_ids_count_from_one_and_stay_with_name_and_directory(tmp_path: Path) -> None:
    a, b = (str(write_adapter(tmp_path / name)) for name in "ab")

    async def test(core: Core, table: AdapterTable) -> None:
        for name, path in (("x", a), ("y", b)):
            await table.load(AdapterSpec(name, path))
        assert [adapter.request.lora_int_id for adapter in table.adapters.values()] == [1, 2]
        await table.unload("x")
        assert list(table.adapters) == ["y"]
        await table.load(AdapterSpec("x", a))
        assert table.adapters["x"].request.lora_int_id == 1
        await table.load(AdapterSpec("x", b, load_inplace=True))  # another directory: the core gets another id
        assert table.adapters["x"].request == LoRARequest("x", 3, b)
        verbs = [(verb, getattr(what, "lora_int_id", what)) for verb, what in core.calls]
        assert verbs == [
            *(("add_lora", 1), ("add_lora", 2), ("remove_lora", 1), ("add_lora", 1)),
            *(("add_lora", 3), ("remove_lora", 1)),
        ]
        assert [call[1].load_inplace for call in core.calls if call[0] == "add_lora"] == [False] * 3 + [True]
        assert not table.adapters["x"].request.load_inplace  # requests do not ask for another load

    run(test)


def test_what_is_not_loaded_is_not_served(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a"))

    async def test(core: Core, table: AdapterTable) -> None:
        with pytest.raises(ClientError, match="'demo' is a name of the model"):
            await table.load(AdapterSpec("demo", path))
        with pytest.raises(NotFoundError, match="no such directory"):
            await table.load(AdapterSpec("a", "/no/where"))
        core.error = AdapterError("it does not fit")
        with pytest.raises(AdapterError, match="does not fit"):
            await table.load(AdapterSpec("a", path))
        assert not table.adapters
        core.error = None
        await table.load(AdapterSpec("a", path))
        with pytest.raises(ClientError, match="'a' is loaded already; set load_inplace"):
            await table.load(AdapterSpec("a", path))
        await table.load(AdapterSpec("a", path, load_inplace=True))
        with pytest.raises(NotFoundError, match="there is no adapter 'b'"):
            await table.unload("b")

    run(test)
    with pytest.raises(ValidationError, match="--enable-lora"):
        run(lambda core, table: table.load(AdapterSpec("a", path)), LoRAConfig())


def test_changes_of_a_name_follow_each_other_and_wait_for_no_other_name(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a"))

    async def test(core: Core, table: AdapterTable) -> None:
        core.may_answer.clear()
        first = asyncio.create_task(table.load(AdapterSpec("a", path)))
        while not core.calls:
            await asyncio.sleep(0)
        later = [asyncio.create_task(table.load(AdapterSpec("a", path))), asyncio.create_task(table.unload("a"))]
        assert (await table.adopt("b", path)).name == "b"  # without the core
        assert "a" not in table.adapters
        core.may_answer.set()
        await first
        results = await asyncio.gather(*later, return_exceptions=True)
        assert [type(result) for result in results] == [ClientError, type(None)]
        assert list(table.adapters) == ["b"]
        assert [call[0] for call in core.calls] == ["add_lora", "remove_lora"]
        assert not table._turns

    run(test)


def test_modules_are_loaded_in_order_and_name_what_fails(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a"))

    async def test(core: Core, table: AdapterTable) -> None:
        await load_modules(table, [f"x={path}", f'{{"name": "y", "path": "{path}", "base_model_name": "m"}}'])
        assert list(table.adapters) == ["x", "y"]
        with pytest.raises(NotFoundError, match="--lora-modules z: there is no adapter at /no/where"):
            await load_modules(table, ["z=/no/where"])

    run(test)


# -- several processes ------------------------------------------------------------------------------------------------


def test_processes_share_the_table_of_their_parent(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a"))

    def sent(value: Any) -> Any:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value))

    async def main() -> None:
        core, remotes = Core(), list[RemoteTable]()

        async def report(name: str, adapter: ServedAdapter | None) -> None:
            for remote in remotes:
                remote.note(name, sent(adapter))

        table = AdapterTable(AdapterDoor(ENABLED), core.call, ["demo"], report)

        async def call(operation: str, *args: Any) -> Any:
            return sent(await answer_peer(table, operation, *sent(args)))

        remotes += [RemoteTable(call), RemoteTable(call)]
        one, other = remotes
        loaded = await one.load(AdapterSpec("x", path, "parent"))
        assert loaded.request == LoRARequest("x", 1, path)
        assert one.adapters == other.adapters == table.adapters
        await other.adopt("y", path)
        await one.unload("x")
        assert list(one.adapters) == list(other.adapters) == ["y"]
        late = RemoteTable(call)
        await late.refresh()
        assert late.adapters == table.adapters
        with pytest.raises(NotFoundError):
            await late.unload("x")
        with pytest.raises(ClientError, match="no call 'steal'"):
            await call("steal")

    asyncio.run(main())


# -- directories ------------------------------------------------------------------------------------------------------


def test_adapters_are_named_by_their_paths(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "adapters", write_adapter(tmp_path / "elsewhere")
    write_adapter(root / "sql")
    write_adapter(root / "sql" / "checkpoint-1")  # inside an adapter
    write_adapter(root / "team" / "chat")
    (root / "empty").mkdir()
    (root / "linked").symlink_to(elsewhere)
    (root / "loop").symlink_to(root)
    write_adapter(tmp_path / "more" / "sql")
    found = scan([str(root), str(tmp_path / "more")])
    assert found == {
        "sql": str(root / "sql"),
        "team/chat": str(root / "team" / "chat"),
        "linked": str(root / "linked"),
    }


def test_a_miss_looks_again_once_a_second(tmp_path: Path) -> None:
    now = 100.0
    root = tmp_path / "adapters"
    write_adapter(root / "a")

    async def main() -> None:
        nonlocal now
        dirs = AdapterDirs([str(root)], lambda: now)
        write_adapter(root / "b")
        assert await dirs.find("a") == str(root / "a")
        assert await dirs.find("b") is None  # the last scan is too young
        now += 1
        assert await asyncio.gather(*(dirs.find(name) for name in "bbc")) == [str(root / "b")] * 2 + [None]
        write_adapter(root / "c")
        assert await dirs.find("c") is None
        now += 1
        for name in ("../adapters/a", str(root / "a"), "./a", "a/", "", "a\0"):
            assert await dirs.find(name) is None, name
        assert await dirs.find("c") == str(root / "c")

    asyncio.run(main())


def test_only_paths_below_a_directory_are_held(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write_adapter(root / "a")
    write_adapter(tmp_path / "adapters2")
    (root / "out").symlink_to(tmp_path / "adapters2")
    dirs = AdapterDirs([str(root)])
    assert dirs.holds(str(root / "a"))
    assert dirs.holds(f"{root}/a/../a")
    for path in (root, tmp_path / "adapters2", root / "out", f"{root}/../adapters2", "owner/name", "/"):
        assert not dirs.holds(str(path)), path
    assert not AdapterDirs([]).holds(str(root / "a"))


def test_the_registry_serves_the_table_first_and_adopts_what_a_directory_has(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write_adapter(root / "a")
    path = str(write_adapter(tmp_path / "elsewhere"))
    config = LoRAConfig(enable_lora=True, lora_dir=(str(root),))

    async def test(core: Core, table: AdapterTable) -> None:
        registry = AdapterRegistry(table, config)
        await table.load(AdapterSpec("b", path, "base"))
        assert registry.list() == [("b", "base"), ("a", None)]
        found = await registry.find("a")
        assert found is not None
        assert found.request == LoRARequest("a", 2, str(root / "a"))
        assert await registry.find("a") is found
        assert await registry.find("c") is None
        assert len(core.calls) == 1  # the core reads an adopted one when it gets a request

    run(test, config)


# -- templates --------------------------------------------------------------------------------------------------------


def test_templates_of_adapters(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    assert read_template(directory, None) is None
    with pytest.raises(ValidationError, match="put a chat_template"):
        read_template(directory, "adapter")
    (directory / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert read_template(directory, "adapter") == "old"
    (directory / "chat_template.jinja").write_text("new")
    assert read_template(directory, "adapter") == "new"
    (tmp_path / "mine.jinja").write_text("mine")
    assert read_template(directory, str(tmp_path / "mine.jinja")) == "mine"
    (tmp_path / "linked.jinja").symlink_to("/dev/zero")
    for name in ("none.jinja", "linked.jinja"):
        with pytest.raises(ValidationError):
            read_template(directory, str(tmp_path / name))
