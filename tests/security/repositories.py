"""Model repositories that mean ill: what is wrong with each, and how its loading must end."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .templates import ESCAPES, WORK

LOADS = "loaded"
"""The outcome where the evil is simply not looked at."""
SECRET = "a-secret-of-another-file"


@dataclass(frozen=True)
class Repository:
    """`spoil` changes a copy of a good checkpoint; `outcome` is a part of what the loader must say."""

    name: str
    spoil: Callable[[Path], None]
    outcome: str


def config(outcome: str = "config.json", /, **changes: Any) -> tuple[Callable[[Path], None], str]:
    """Other values in config.json."""

    def spoil(path: Path) -> None:
        value = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**value, **changes}))

    return spoil, outcome


def text(name: str, content: str | bytes, outcome: str) -> tuple[Callable[[Path], None], str]:
    """Another file."""

    def spoil(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil, outcome


def link(
    name: str, target: str, outcome: str = "outside the checkpoint's folder"
) -> tuple[Callable[[Path], None], str]:
    """A file that is another one. The target is seen from the repository, or absolute."""

    def spoil(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return spoil, outcome


def special(name: str, outcome: str = "is not a regular file") -> tuple[Callable[[Path], None], str]:
    """A pipe that is never written to."""

    def spoil(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return spoil, outcome


def header(
    edit: Callable[[dict[str, Any]], Any], outcome: str = "model.safetensors"
) -> tuple[Callable[[Path], None], str]:
    """Another header of model.safetensors, before the same data."""

    def spoil(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        found = json.loads(data[8 : 8 + size])
        edited = edit(found)
        new = edited if isinstance(edited, bytes) else json.dumps(found if edited is None else edited).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return spoil, outcome


def raw_weights(content: bytes, outcome: str = "model.safetensors") -> tuple[Callable[[Path], None], str]:
    return text("model.safetensors", content, outcome)


def index(outcome: str, /, **files: str) -> tuple[Callable[[Path], None], str]:
    """Shards instead of one file: an index that names these for tensors."""

    def spoil(path: Path) -> None:
        (path / "model.safetensors").rename(path / "model-1.safetensors")
        names = {name.replace("__", "."): file for name, file in files.items()}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return spoil, outcome


def only_pickle(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")


def pickle_too(path: Path) -> None:
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    (path / "training_args.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")


def remote_code(path: Path) -> None:
    config(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, trust_remote_code=True)[0](
        path
    )
    for name in ("evil.py", "modeling_llama.py", "configuration_llama.py", "tokenization_llama.py", "sitecustomize.py"):
        (path / name).write_text("raise SystemExit('owned')")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def remote_architecture(path: Path) -> None:
    remote_code(path)
    config(architectures=["EvilForCausalLM"])[0](path)


def tokenizer(edit: Callable[[dict[str, Any]], Any], outcome: str) -> tuple[Callable[[Path], None], str]:
    """Another tokenizer.json."""

    def spoil(path: Path) -> None:
        value = json.loads((path / "tokenizer.json").read_text())
        edit(value)
        (path / "tokenizer.json").write_text(json.dumps(value))

    return spoil, outcome


def settings(outcome: str, /, **changes: Any) -> tuple[Callable[[Path], None], str]:
    return text("tokenizer_config.json", json.dumps(changes), outcome)


def first(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of the first tensor."""
    return next(entry for name, entry in header.items() if name != "__metadata__")


def _reach(header: dict[str, Any]) -> None:
    last = max((e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"][1])
    size = last["data_offsets"][1] - last["data_offsets"][0]
    last["data_offsets"] = [1 << 40, (1 << 40) + size]


def _sparse(path: Path) -> None:
    """A config.json of 200 MB that takes no room on the disk."""
    with (path / "config.json").open("wb") as file:
        file.truncate(200 << 20)


def _overlap(header: dict[str, Any]) -> None:
    begin, end = first(header)["data_offsets"]
    first(header)["data_offsets"] = [begin + 4, end + 4]


def _far_token(value: dict[str, Any]) -> None:
    value["added_tokens"].append({**value["added_tokens"][0], "id": 2**32 - 1, "content": "far"})


def _wide_padding(value: dict[str, Any]) -> None:
    value["padding"] = {
        "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip


def _slow_pattern(value: dict[str, Any]) -> None:
    value["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(h|e|l|o|ho)*$x"}, "content": "y"}


def _doubling(part: str, steps: str) -> Callable[[dict[str, Any]], None]:
    """Thirty replacements, each of which doubles a text."""

    def edit(value: dict[str, Any]) -> None:
        double = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
        value[part] = {"type": "Sequence", steps: [double] * 30}

    return edit


def _copies(value: dict[str, Any]) -> None:
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [piece] * 2, "pair": [piece], "special_tokens": {}}
    value["post_processor"] = {"type": "Sequence", "processors": [template] * 30}


def _steep_pattern(value: dict[str, Any]) -> None:
    """The library's assertion fails when such a pattern takes too many steps."""
    value["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}
    value["added_tokens"].append({**value["added_tokens"][0], "id": 511, "content": "x" * 60, "normalized": True})


_HUGE = 10**12
_SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    # what is code elsewhere
    "remote code": (remote_code, LOADS),
    "remote architecture": (remote_architecture, "UnsupportedModelError"),
    "pickle only": (only_pickle, "a pickle, which Quire never opens"),
    "pickle beside": (pickle_too, LOADS),
    "quantization code": config("quantization", quantization_config={"quant_method": "evil", "modules": ["os.system"]}),
    # config.json
    "layers": config("num_hidden_layers", num_hidden_layers=10**9),
    "layers as float": config("num_hidden_layers", num_hidden_layers=1e300),
    "hidden size": config("hidden_size", hidden_size=_HUGE),
    "vocabulary": config("vocab_size", vocab_size=_HUGE),
    "heads": config("num_attention_heads", num_attention_heads=_HUGE),
    "no heads": config("num_attention_heads", num_attention_heads=0),
    "context": config("max_position_embeddings", max_position_embeddings=_HUGE),
    "negative": config("intermediate_size", intermediate_size=-1),
    "words": config("hidden_size", hidden_size="48; import os"),
    "truth": config("hidden_size", hidden_size=True),
    "NaN size": config("hidden_size", hidden_size=float("nan")),
    "infinite size": config("hidden_size", hidden_size=float("inf")),
    "NaN rope": config("rope", rope_parameters={"rope_theta": float("nan")}),
    "NaN norm": config("rms_norm_eps", rms_norm_eps=float("nan")),
    "experts": config("num_local_experts", architectures=["MixtralForCausalLM"], num_local_experts=10**9),
    "architecture list": config("architecture", architectures=[["os"]]),
    "deep config": text("config.json", "[" * 10**6, "not valid JSON"),
    "deep object": text("config.json", '{"a":' * 10**6, "not valid JSON"),
    "long number": text("config.json", '{"hidden_size":' + "9" * 10**6 + "}", "not valid JSON"),
    "large config": (_sparse, "no such file has more than"),
    "binary config": text("config.json", b"\xff\xfe\x00", "not UTF-8"),
    "config pipe": special("config.json"),
    "config device": link("config.json", "/dev/zero"),
    "config link": link("config.json", "../../outside/secret.json"),
    "config loop": link("config.json", "config.json", "is missing"),
    "generation link": link("generation_config.json", "../../outside/secret.json"),
    "generation pipe": special("generation_config.json"),
    "generation NaN": text("generation_config.json", '{"temperature": NaN, "top_p": -1}', "temperature"),
    "generation words": text("generation_config.json", '{"top_k": "__import__"}', "top_k"),
    "generation eos": text("generation_config.json", '{"eos_token_id": {"a": 1}}', "special token"),
    "generation list": text("generation_config.json", "[1]", "holds a list"),
    # weights
    "overlap": header(_overlap),
    "reach": header(_reach),
    "backwards": header(lambda h: first(h).update(data_offsets=[100, 0])),
    "negative offset": header(lambda h: first(h).update(data_offsets=[-8, 8])),
    "overflow": header(lambda h: first(h).update(shape=[2**32, 2**32, 4])),
    "NaN shape": header(lambda h: first(h).update(shape=[float("nan")])),
    "float shape": header(lambda h: first(h).update(shape=[1e3, 2])),
    "long shape": header(lambda h: first(h).update(shape=[1] * 10**5)),
    "strange type": header(lambda h: first(h).update(dtype="__import__")),
    "no entry": header(lambda h: h.update({"lm_head.weight": "x"})),
    "twice": header(lambda h: (b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},' * 2)[:-1] + b"}"),
    "deep header": header(lambda h: b"[" * 10**6, "JSON"),
    "header beyond the file": raw_weights(struct.pack("<Q", 2**63) + b"{}"),
    "short file": raw_weights(b"\x00"),
    "empty file": raw_weights(b""),
    "zip bomb as weights": raw_weights(b"PK\x03\x04" + b"\x00" * 100),
    "weights link": link("model.safetensors", "../../outside/model.safetensors"),
    "weights device": link("model.safetensors", "/dev/zero"),
    "weights pipe": special("model.safetensors"),
    "index up": index("outside the checkpoint's folder", a="../../outside/model.safetensors"),
    "index absolute": index("outside the checkpoint's folder", a="/etc/passwd"),
    "index null": index("outside the checkpoint's folder", a="x\0y"),
    "index folder": index("not a regular file", a="."),
    "index pickle": index("is missing", a="pytorch_model.bin"),
    "index link": link("model.safetensors.index.json", "../../outside/secret.json", LOADS),
    # tokenizer
    "tokenizer link": link("tokenizer.json", "../../outside/secret.json"),
    "tokenizer device": link("tokenizer.json", "/dev/zero"),
    "tokenizer pipe": special("tokenizer.json"),
    "tokenizer garbage": text("tokenizer.json", "{}", "cannot be read as a tokenizer"),
    "deep tokenizer": text("tokenizer.json", "[" * 10**6, "cannot be read as a tokenizer"),
    "tokenizer ids": tokenizer(_far_token, ""),
    "tokenizer bomb": tokenizer(_wide_padding, LOADS),
    "tokenizer pattern": tokenizer(_slow_pattern, ""),
    "doubling normalizer": tokenizer(_doubling("normalizer", "normalizers"), "its replacements multiply a text"),
    "doubling decoder": tokenizer(_doubling("decoder", "decoders"), "its replacements multiply a text"),
    "copying template": tokenizer(_copies, "its replacements multiply a text"),
    "steep pattern": tokenizer(_steep_pattern, "cannot be used as a tokenizer"),
    "decoder ids": settings("tokenizer configuration", added_tokens_decoder={"x": {"content": "y"}}),
    "decoder far": settings("", added_tokens_decoder={str(2**62): {"content": "y"}}),
    "decoder words": settings("tokenizer configuration", added_tokens_decoder=["x"]),
    "token object": settings("tokenizer configuration", eos_token={"evil": 1}),
    "settings link": link("tokenizer_config.json", "../../outside/secret.json"),
    "settings pipe": special("tokenizer_config.json"),
    # chat template
    "template link": link("chat_template.jinja", "../../outside/secret.json"),
    "template pipe": special("chat_template.jinja"),
    "large template": text("chat_template.jinja", "x" * (5 << 20), "no such file has more than"),
    "long template": text("chat_template.jinja", "x" * (2 << 20), "at most"),
    "template list": settings("tokenizer configuration", chat_template=[1]),
}  # fmt: skip
REPOSITORIES = [
    *(Repository(name, *how) for name, how in _SPOILED.items()),
    *(Repository(f"escape {name}", text("chat_template.jinja", source, "")[0], "") for name, source in ESCAPES.items()),
    *(Repository(f"work {name}", text("chat_template.jinja", source, "")[0], "") for name, source in WORK.items()),
]


def write_all(root: Path, good: Path) -> None:
    """Every repository under `root`/repositories, and beside them what they would like to reach."""
    outside = root / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text(json.dumps({"secret": SECRET}))
    shutil.copy(good / "model.safetensors", outside)
    for repository in REPOSITORIES:
        path = root / "repositories" / repository.name
        shutil.copytree(good, path)
        repository.spoil(path)
