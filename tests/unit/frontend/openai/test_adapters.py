"""LoRA adapters over HTTP: loaded and unloaded, named as a model by every API, found in directories."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from quire.errors import AdapterError
from quire.frontend.openai.app import build_app, load_adapters
from tests.adapters import tensors, write_adapter

from .serving import Server, check, client_of

LOADED = "Success: LoRA adapter '{}' added successfully."
UNLOADED = "Success: LoRA adapter '{}' removed successfully."
ON = {"enable_lora": True}
Test = Callable[[Server, httpx2.AsyncClient], Awaitable[None]]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "ignore_eos": True, "seed": 1}


def check_admin(test: Test, engine_flags: dict[str, Any] | None = None, **flags: Any) -> None:
    """Run `test` against a server with adapters, and a client of its admin listener."""

    async def run(server: Server) -> None:
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            await test(server, admin)

    check(run, enable_admin=True, engine_flags={**ON, **(engine_flags or {})}, **flags)


async def load(client: httpx2.AsyncClient, name: str, path: Path | str, **more: Any) -> httpx2.Response:
    return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


async def unload(client: httpx2.AsyncClient, name: str) -> httpx2.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def error_of(response: httpx2.Response) -> tuple[int, str, str, str]:
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return error["code"], error["type"], error["param"], error["message"]


async def names_of(server: Server) -> list[str]:
    return [card["id"] for card in (await server.get("/v1/models")).json()["data"]]


def test_an_adapter_is_loaded_named_and_unloaded(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "files")

    async def test(server: Server, admin: httpx2.AsyncClient) -> None:
        before = await server.answer("/v1/chat/completions", **CHAT)
        loaded = await load(admin, "sql", directory, base_model_name="base")
        assert (loaded.status_code, loaded.text) == (200, LOADED.format("sql"))
        assert loaded.headers["content-type"].startswith("text/plain")
        demo, card = (await server.get("/v1/models")).json()["data"]
        assert (demo["id"], demo["parent"]) == ("demo", None)
        assert (card["id"], card["root"], card["parent"]) == ("sql", "sql", "base")
        assert card["max_model_len"] == demo["max_model_len"]
        assert str(tmp_path) not in json.dumps(card)
        assert (await server.get("/v1/models/sql")).json() == card
        answer = await server.answer("/v1/chat/completions", model="sql", **CHAT)
        assert answer["model"] == "sql"
        assert answer["choices"] != before["choices"]
        assert (await server.answer("/v1/chat/completions", model="demo", **CHAT))["choices"] == before["choices"]
        gone = await unload(admin, "sql")
        assert (gone.status_code, gone.text) == (200, UNLOADED.format("sql"))
        assert await names_of(server) == ["demo"]
        error = await server.refusal("/v1/chat/completions", 404, model="sql", **CHAT)
        assert (error["type"], error["param"]) == ("NotFoundError", "model")
        assert "there is demo (" in error["message"]

    check_admin(test)


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good")
    too_large = write_adapter(tmp_path / "too-large", r=64)
    other_type = write_adapter(tmp_path / "other", peft_type="IA3")
    torn = write_adapter(tmp_path / "torn")
    (torn / "adapter_model.safetensors").write_bytes(b"\xff" * 40)

    async def test(server: Server, admin: httpx2.AsyncClient) -> None:
        async def refusal(name: str, path: Path | str, **more: Any) -> tuple[int, str, str, str]:
            return error_of(await load(admin, name, path, **more))

        for name, path, param, words in (
            ("", good, "lora_name", "lora_name is empty"),
            ("a", "", "lora_path", "lora_path is empty"),
            ("demo", good, "lora_name", "'demo' is a name of the model"),
            ("a", too_large, "lora_path", "rank 64; --max-lora-rank is 32"),
            ("a", other_type, "lora_path", "peft_type"),
            ("a", torn, "lora_path", "adapter_model.safetensors"),
            ("x" * 257, good, "lora_name", "256"),
            ("a", "x" * 4097, "lora_path", "4096"),
        ):
            status, kind, where, message = await refusal(name, path)
            assert (status, kind, where) == (400, "InvalidUserInput", param), message
            assert words in message
        for path in (tmp_path / "none", good / "adapter_config.json", "a\0b"):
            assert (await refusal("a", path))[:3] == (404, "NotFoundError", "lora_path"), path
        assert (await refusal("a", good, chat_template="adapter"))[2] == "chat_template"
        assert await names_of(server) == ["demo"]
        assert (await load(admin, "a", good)).status_code == 200
        assert "'a' is loaded already" in (await refusal("a", good))[3]
        assert (await load(admin, "a", good, load_inplace=True)).status_code == 200
        assert error_of(await unload(admin, ""))[:3] == (400, "InvalidUserInput", "lora_name")
        assert error_of(await unload(admin, "b"))[:3] == (404, "NotFoundError", "lora_name")

    check_admin(test, {"max_lora_rank": 32})


def test_without_the_switch_the_flag_is_named(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")

    async def test(server: Server) -> None:
        async with client_of(build_app(server.state, is_admin=True)) as admin:
            status, _, _, message = error_of(await load(admin, "a", directory))
            assert (status, "--enable-lora" in message) == (400, True)
            assert error_of(await unload(admin, "a"))[0] == 404

    check(test, enable_admin=True)


def test_a_load_that_the_engine_refuses_serves_nothing(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "missing")  # the fake worker finds no file below such a name

    async def test(server: Server, admin: httpx2.AsyncClient) -> None:
        status, kind, param, message = error_of(await load(admin, "a", directory))
        assert (status, kind, param) == (400, "InvalidUserInput", "lora_path"), message
        assert await names_of(server) == ["demo"]
        assert (await server.answer("/v1/completions", prompt="x", max_tokens=1))["model"] == "demo"

    check_admin(test)


def test_the_public_listener_has_the_routes_for_directories_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "adapters"
    inside, outside = write_adapter(root / "a"), write_adapter(tmp_path / "b")
    (root / "link").symlink_to(outside)
    flags = {**ON, "lora_dir": str(root)}

    async def closed(server: Server) -> None:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await server.post(path, {"lora_name": "x", "lora_path": str(inside)})).status_code == 404

    async def open_(server: Server) -> None:
        assert (await load(server.client, "mine", inside)).status_code == 200
        for path in (outside, root / "link", root, f"{root}/../b", "owner/name", "/etc"):
            status, _, param, message = error_of(await load(server.client, "x", path))
            assert (status, param) == (400, "lora_path"), message
            assert str(outside) not in message
        error = error_of(await load(server.client, "x", inside, chat_template=str(outside / "adapter_config.json")))
        assert error[2] == "chat_template"
        assert (await unload(server.client, "mine")).status_code == 200

    async def without_directory(server: Server) -> None:
        assert "the server has none" in error_of(await load(server.client, "x", inside))[3]

    check(closed, engine_flags=flags)
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    check(open_, engine_flags=flags)
    check(without_directory, engine_flags=ON)


def test_names_of_directories_are_looked_up(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write_adapter(root / "sql")
    write_adapter(root / "team" / "chat")
    write_adapter(tmp_path / "secret")

    async def test(server: Server) -> None:
        assert await names_of(server) == ["demo", "sql", "team/chat"]
        for name in ("sql", "team/chat"):
            answer = await server.answer("/v1/completions", model=name, prompt="x", max_tokens=2)
            assert answer["model"] == name
            assert (await server.get(f"/v1/models/{name}")).json()["parent"] == "demo"
        for name in ("../secret", str(tmp_path / "secret"), str(root / "sql"), "team", "team/../sql", "sql/", "."):
            error = await server.refusal("/v1/completions", 404, model=name, prompt="x")
            assert error["param"] == "model"
        assert await names_of(server) == ["demo", "sql", "team/chat"]

    check(test, engine_flags={"lora_dir": str(root)})


def test_a_bad_adapter_of_a_directory_fails_its_requests_alone(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write_adapter(root / "bad", tensors(), r=-1)
    write_adapter(root / "missing-tensor")

    async def test(server: Server) -> None:
        for name in ("bad", "missing-tensor"):
            for _ in range(2):
                error = await server.refusal("/v1/completions", 400, model=name, prompt="x")
                assert name in error["message"]
                assert str(tmp_path) not in error["message"]
        assert (await server.answer("/v1/completions", prompt="x", max_tokens=1))["model"] == "demo"

    check(test, engine_flags={"lora_dir": str(root)})


def test_every_api_takes_the_name(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")

    async def test(server: Server, admin: httpx2.AsyncClient) -> None:
        await load(admin, "sql", directory)
        chat = CHAT["messages"]
        answers = {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": chat},
            "/v1/chat/completions/batch": {"messages": [chat, chat]},
            "/v1/responses": {"input": "x"},
            "/v1/messages": {"messages": chat, "max_tokens": 4},
            "/api/chat": {"messages": chat, "stream": False},
            "/api/generate": {"prompt": "x", "stream": False},
            "/v1/chat/completions/render": {"messages": chat},
        }
        for path, body in answers.items():
            limit = {} if path.startswith("/api") else {"max_output_tokens" if "responses" in path else "max_tokens": 4}
            if path.startswith("/api"):
                body["options"] = {"num_predict": 4}
            answer = await server.answer(path, model="sql", **{**body, **limit})
            assert answer["model"] == "sql", path
            assert (await server.post(path, {**body, **limit, "model": "no-such"})).status_code == 404, path
        for path, body in (("/tokenize", {"prompt": "x"}), ("/v1/messages/count_tokens", {"messages": chat})):
            await server.answer(path, model="sql", **body)
        events = await server.stream("/v1/chat/completions", model="sql", messages=chat, max_tokens=3)
        assert {event["model"] for event in events} == {"sql"}
        tagged = await server.answer("/api/chat", model="sql:latest", messages=chat, stream=False)
        assert tagged["model"] == "sql:latest"
        tags = {card["name"]: card for card in (await server.get("/api/tags")).json()["models"]}
        assert list(tags) == ["demo", "sql"]
        assert tags["sql"]["details"]["parent_model"] == "demo"
        await server.answer("/api/show", model="sql")

    check_admin(test, enable_scale_out=True)


def test_the_template_is_the_models_unless_the_adapters_is_asked_for(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")

    async def test(server: Server, admin: httpx2.AsyncClient) -> None:
        await load(admin, "plain", directory)
        await load(admin, "own", directory, chat_template="adapter")
        texts = {}
        for name in ("demo", "plain", "own"):
            body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
            ids = (await server.answer("/tokenize", **body))["tokens"]
            texts[name] = (await server.answer("/detokenize", tokens=ids))["prompt"]
            chat = await server.answer("/v1/chat/completions", **body, max_tokens=1, return_prompt_text=True)
            assert chat["prompt_text"] == texts[name]
        assert texts["own"] == "[Hi]"
        assert texts["plain"] == texts["demo"] != "[Hi]"

    check_admin(test)


def test_requests_under_way_end_with_the_adapter_they_began_with(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")

    async def test(server: Server, admin: httpx2.AsyncClient) -> None:
        await load(admin, "sql", directory)
        body = {**CHAT, "max_tokens": 100, "model": "sql"}
        whole = await server.answer("/v1/chat/completions", **body)
        running = asyncio.create_task(server.answer("/v1/chat/completions", **body))
        while not server.engine.pipeline.output_processor.request_states:
            await asyncio.sleep(0)
        write_adapter(directory, lora_alpha=3)
        (directory / "adapter_model.safetensors").write_bytes(
            (write_adapter(tmp_path / "b", r=8) / "adapter_model.safetensors").read_bytes()
        )
        write_adapter(directory, r=8)
        assert (await load(admin, "sql", directory, load_inplace=True)).status_code == 200
        assert (await unload(admin, "sql")).status_code == 200
        assert (await running)["choices"] == whole["choices"]

    check_admin(test)


def test_modules_are_there_from_the_start(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")

    async def test(server: Server) -> None:
        await load_adapters(server.state)
        assert await names_of(server) == ["demo", "a", "b"]
        assert (await server.answer("/v1/completions", model="b", prompt="x", max_tokens=1))["model"] == "b"

    items = (f"a={directory}", json.dumps({"name": "b", "path": str(directory)}))
    check(test, engine_flags=ON, lora_modules=items)

    async def fails(server: Server) -> None:
        with pytest.raises(AdapterError, match="--lora-modules bad: "):
            await load_adapters(server.state)

    bad = write_adapter(tmp_path / "bad", tensors(), r=0)
    check(fails, engine_flags=ON, lora_modules=(f"bad={bad}",))


def test_adapters_are_in_the_metrics(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")

    async def test(server: Server, admin: httpx2.AsyncClient) -> None:
        await load(admin, "sql", directory)
        for model in ("sql", "demo", "sql"):
            await server.answer("/v1/completions", model=model, prompt="x y", max_tokens=5, ignore_eos=True)
        text = (await server.get("/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

        def value(name: str, label: str) -> float:
            return next(float(lines[key]) for key in lines if key.startswith(name + "{") and label in key)

        for name, total in (("generation", 15), ("prompt", None)):
            of = {adapter: value(f"quire_lora_{name}_tokens_total", f'adapter="{adapter}"') for adapter in ("sql", "")}
            assert of["sql"] == 2 * of[""] > 0
            assert sum(of.values()) == value(f"vllm:{name}_tokens_total", "engine")
            assert total is None or sum(of.values()) == total
        assert value("quire_lora_loads_total", 'outcome="loaded"') == 1
        assert value("quire_lora_adapters", 'state="ready"') == 1
        assert value("quire_lora_resident_bytes", "engine") > 0
        assert 'vllm:lora_requests_info{max_lora="3",waiting_lora_adapters="",running_lora_adapters=""}' in text

    check_admin(test, {"max_loras": 3, "disable_log_stats": False})
