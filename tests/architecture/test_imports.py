"""The import law of DESIGN.md §2: folders are processes, and never import one another."""

from __future__ import annotations

from tools.measures import Import

from .sources import CHECKOUT, is_standard

VOCABULARY = {
    "quire.errors",
    "quire.envs",
    "quire.failpoints",
    "quire.field_bounds",
    "quire.interrupts",
    "quire.kv_transfer_params",
    "quire.logger",
    "quire.resolve",
    "quire.sampling_params",
    "quire.structured_outputs",
    "quire.pooling_params",
    "quire.lora_request",
    "quire.outputs",
    "quire.timeline",
    "quire.version",
    "quire.vllm_names",
}
FACE = {"quire", "quire.__main__"}

MAY_IMPORT: dict[str, set[str]] = {
    "vocabulary": {"vocabulary"},
    "config": {"vocabulary", "config"},
    "wire": {"vocabulary", "wire"},
    "kv_store": {"vocabulary", "config", "wire", "kv_store"},
    "worker": {"vocabulary", "config", "wire", "kv_store", "worker"},
    "engine": {"vocabulary", "config", "wire", "kv_store", "engine"},
    "frontend": {"vocabulary", "config", "wire", "frontend"},
    "face": {"vocabulary", "config", "frontend", "cli"},  # names for type checkers; loaded lazily
    "coordinator": {"vocabulary", "wire", "coordinator"},
    "replay": {"vocabulary", "config", "wire", "engine", "replay"},
    "cli": {
        *("vocabulary", "config", "wire", "kv_store", "worker", "engine", "frontend", "replay", "testing", "cli"),
        "face",
    },
    "testing": {"vocabulary", "config", "wire", "kv_store", "worker", "engine", "frontend", "testing", "cli", "face"},
    "on_ray": {"vocabulary", "config", "wire", "engine", "frontend", "on_ray"},
}
THIRD_PARTY: dict[str, set[str]] = {
    "vocabulary": {"msgspec"},
    "config": {"huggingface_hub", "msgspec"},
    "wire": {"msgspec", "zmq", "numpy"},
    "kv_store": {"numpy", "msgspec", "zmq", "blake3", "zstandard"},
    "worker": {"torch", "safetensors", "numpy", "transformers"},
    "engine": {"zmq", "numpy", "msgspec", "llguidance", "xgrammar"},
    "frontend": {
        *("zmq", "tokenizers", "jinja2", "numpy", "tqdm", "transformers", "msgspec", "safetensors"),
        *("starlette", "uvicorn", "prometheus_client", "opentelemetry"),
    },
    "coordinator": {"msgspec", "zmq"},
    "replay": {"msgspec", "numpy"},
    "on_ray": {"ray"},
    "face": set(),
    "cli": {"zmq", "yaml", "tqdm", "numpy", "torch", "msgspec", "gguf", "aiohttp"},
    "testing": {"zmq", "torch", "numpy", "tokenizers", "transformers", "safetensors", "msgspec", "prometheus_client"},
}
ONLY_IN: dict[str, set[str]] = {
    "transformers": {
        "quire.frontend.text.tokenizer_files",
        "quire.frontend.text.tokenizer",
        "quire.testing.tiny_models",
        *(f"quire.worker.fallback.{name}" for name in ("adoption", "interface", "load", "verdicts")),
    },
    "yaml": {"quire.cli.command_line", "quire.cli.flags"},
    "torch": {"quire.cli.collect_env"},
    "opentelemetry": {"quire.frontend.otel"},
    "gguf": {"quire.cli.gguf_checkpoint"},
    "prometheus_client": {"quire.frontend.metrics.server_metrics", "quire.testing.metrics_audit"},
    "aiohttp": {"quire.cli.remote.client"},
    "ray": {"quire.on_ray.manager", "quire.on_ray.executor"},
}
"""Third-party packages that only these modules of cli, frontend and testing may touch (and, for torch, worker/)."""


def folder_of(module: str) -> str:
    if module in VOCABULARY:
        return "vocabulary"
    if module in FACE:
        return "face"
    return module.split(".")[1]


def test_every_module_has_a_place_in_the_table() -> None:
    unknown = {m for m in CHECKOUT.modules if folder_of(m) not in MAY_IMPORT}
    assert not unknown, f"modules in no room of the house plan: {sorted(unknown)}"


def test_folders_import_only_what_the_table_allows() -> None:
    broken = [
        str(i)
        for i in CHECKOUT.all_imports
        if i.package == "quire" and folder_of(i.imported) not in MAY_IMPORT[folder_of(i.importer)]
    ]
    assert not broken, "\n".join(broken)


def test_third_party_packages_stay_in_their_folders() -> None:
    broken = []
    for i in CHECKOUT.all_imports:
        is_foreign = i.package != "quire" and not is_standard(i.package)
        if is_foreign and i.package not in THIRD_PARTY[folder_of(i.importer)]:
            broken.append(str(i))
    assert not broken, "\n".join(broken)


def test_some_packages_have_one_door() -> None:
    broken = [
        str(i)
        for i in CHECKOUT.all_imports
        if i.package in ONLY_IN
        and i.importer not in ONLY_IN[i.package]
        and not (i.package == "torch" and folder_of(i.importer) in ("worker", "testing"))
    ]
    assert not broken, "\n".join(broken)


def test_the_fallback_is_reached_by_a_dotted_name() -> None:
    """A worker that runs a class of Quire's own never imports transformers."""
    room = "quire.worker.fallback"
    broken = [
        str(i)
        for i in CHECKOUT.all_imports
        if i.imported.startswith(room) and not i.importer.startswith(room) and not i.typing_only
    ]
    assert not broken, "\n".join(broken)


def test_only_the_server_knows_http() -> None:
    web, server = {"starlette", "uvicorn"}, ("quire.frontend.http.", "quire.frontend.openai.")
    broken = [str(i) for i in CHECKOUT.all_imports if i.package in web and not i.importer.startswith(server)]
    assert not broken, "\n".join(broken)


SERVER_FLOORS = ("http", "openai", "fleet")
"""The HTTP machinery, the formats and routes, the processes of one server: each imports itself and those before it,
and nothing else of the frontend imports any of them."""


def _server_floor(module: str) -> int:
    """Returns the floor of a module of the server; -1 for the rest of the frontend."""
    room = module.removeprefix("quire.frontend.").split(".")[0]
    return SERVER_FLOORS.index(room) if room in SERVER_FLOORS else -1


def test_the_server_has_no_arrow_up() -> None:
    broken = [
        str(i)
        for i in CHECKOUT.all_imports
        if i.importer.startswith("quire.frontend.") and _server_floor(i.imported) > _server_floor(i.importer)
    ]
    assert not broken, "\n".join(broken)
    assert {_server_floor(m) for m in CHECKOUT.modules if m.startswith("quire.frontend.")} == {-1, 0, 1, 2}


METRICS = "quire.frontend.metrics."
METRICS_FLOORS = ("collect", "catalog", "publish")
"""Numbers are counted, rows name them, and exporters write the rows: a floor imports itself and those before it. What
stands beside the three puts them together, and is imported by none of them."""


def test_metrics_are_counted_then_named_then_written() -> None:
    broken = [
        str(i)
        for i in CHECKOUT.all_imports
        if i.importer.startswith(METRICS) and i.imported.startswith(METRICS) and _floor(i.imported) > _floor(i.importer)
    ]
    assert not broken, "\n".join(broken)
    assert {_floor(m) for m in CHECKOUT.modules if m.startswith(METRICS)} == {0, 1, 2, 3}


def _floor(module: str) -> int:
    name = module.removeprefix(METRICS).split(".")[0]
    return METRICS_FLOORS.index(name) if name in METRICS_FLOORS else len(METRICS_FLOORS)


def test_no_import_cycles() -> None:
    cycles = [" <-> ".join(group) for group in CHECKOUT.cycles()]
    assert not cycles, "\n".join(cycles)


def test_no_relative_imports() -> None:
    broken = [str(i) for i in CHECKOUT.all_imports if i.imported.startswith(".")]
    assert not broken, "\n".join(broken)


def test_no_function_level_imports_of_our_own() -> None:
    broken = [str(i) for i in CHECKOUT.all_imports if i.in_function and i.package == "quire"]
    assert not broken, "\n".join(broken)


def test_the_law_can_be_broken() -> None:
    """The table refuses what it should: a check that cannot fail proves nothing."""
    bad = Import("quire.engine.core", "quire.worker.worker", 1, False, False)
    assert folder_of(bad.imported) not in MAY_IMPORT[folder_of(bad.importer)]
    assert "torch" not in THIRD_PARTY["engine"] | THIRD_PARTY["frontend"] | THIRD_PARTY["wire"] | THIRD_PARTY["config"]
