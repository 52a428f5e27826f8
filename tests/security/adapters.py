"""Adapters that mean ill, or are broken: what is wrong with each, and what loading it must say."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.adapters import PREFIX, tensors, write_adapter

LOADS = "loaded"
SECRET = "a-secret-of-another-file"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
Spoil = Callable[[Path], None]


def config(outcome: str, /, **changes: Any) -> tuple[Spoil, str]:
    """Other fields in the config; None: without the field."""

    def spoil(path: Path) -> None:
        found = {**json.loads((path / CONFIG).read_text()), **changes}
        (path / CONFIG).write_text(json.dumps({name: value for name, value in found.items() if value is not None}))

    return spoil, outcome


def text(name: str, content: str | bytes, outcome: str) -> tuple[Spoil, str]:
    """Another file."""

    def spoil(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil, outcome


def content(
    edit: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray] | None], outcome: str
) -> tuple[Spoil, str]:
    """Other tensors."""

    def spoil(path: Path) -> None:
        found = tensors()
        write_adapter(path, edit(found) or found)

    return spoil, outcome


def one(name: str, value: Any, outcome: str) -> tuple[Spoil, str]:
    """One tensor more, or another; None: one less."""

    def edit(found: dict[str, np.ndarray]) -> None:
        found.pop(name, None)
        if value is not None:
            found[name] = value

    return content(edit, outcome)


def header(edit: Callable[[dict[str, Any]], Any], outcome: str) -> tuple[Spoil, str]:
    """Another header before the same data."""

    def spoil(path: Path) -> None:
        data = (path / TENSORS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        found = json.loads(data[8 : 8 + size])
        edited = edit(found)
        new = edited if isinstance(edited, bytes) else json.dumps(found if edited is None else edited).encode()
        (path / TENSORS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return spoil, outcome


def link(name: str, target: str, outcome: str) -> tuple[Spoil, str]:
    def spoil(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return spoil, outcome


def pipe(name: str) -> tuple[Spoil, str]:
    def spoil(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return spoil, "is not a regular file"


def vanish(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def become_file(path: Path) -> None:
    vanish(path)
    path.write_text("{}")


def only_pickle(path: Path) -> None:
    (path / TENSORS).rename(path / "adapter_model.bin")


def sparse_header(path: Path) -> None:
    with (path / TENSORS).open("wb") as file:
        file.write(struct.pack("<Q", 200 << 20))
        file.truncate(300 << 20)


def many_tensors(path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    text = ("{" + ",".join(entry % (i, 4 * i, 4 * i + 4) for i in range(10**6)) + "}").encode()
    with (path / TENSORS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + 4 * 10**6)


def cut(path: Path) -> None:
    os.truncate(path / TENSORS, (path / TENSORS).stat().st_size - 1)


def moved(name: str, by: int) -> Callable[[dict[str, Any]], None]:
    def edit(found: dict[str, Any]) -> None:
        begin, end = found[name]["data_offsets"]
        found[name]["data_offsets"] = [begin + by, end + by]

    return edit


def bent(kind: str) -> Callable[[dict[str, np.ndarray]], None]:
    def edit(found: dict[str, np.ndarray]) -> None:
        a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
        if kind == "transposed":
            found[a] = np.ascontiguousarray(found[a].T)
        elif kind == "rank of A":
            found[a] = found[a][:3]
        elif kind == "rank of both":
            found[a], found[b] = found[a][:3], np.ascontiguousarray(found[b][:, :3])
        elif kind == "inputs":
            found[a] = np.ones((4, 64), np.float32)
        elif kind == "outputs":
            found[b] = np.ones((64, 4), np.float32)
        elif kind == "a vector":
            found[a] = np.ones(48, np.float32)
        elif kind == "no rows":
            found[a] = np.ones((0, 48), np.float32)

    return edit


def holding(value: float, name: str = f"{Q}.lora_B.weight") -> Callable[[dict[str, np.ndarray]], None]:
    def edit(found: dict[str, np.ndarray]) -> None:
        found[name][-1, -1] = value

    return edit


def also(module: str) -> Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]:
    """The factors of q once more, as another module's."""
    return lambda found: {**found, **{n.replace(Q, module): v for n, v in found.items() if n.startswith(Q)}}


def called(module: str) -> Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]:
    """The factors of q as another module's."""
    return lambda found: {n.replace(Q, module): v for n, v in found.items()}


def void(_: Any) -> None:
    """Discards a value."""


RAW = np.ones((4, 48), np.int32)
BOMB = b"cos\nsystem\n(S'touch /tmp/owned'\ntR."
BAD: dict[str, tuple[Spoil, str]] = {
    "missing directory": (vanish, "there is no directory"),
    "a file as path": (become_file, "is no directory"),
    "no config": (lambda path: (path / CONFIG).unlink(), f"has no {CONFIG}"),
    "config of 2 MiB": text(CONFIG, " " * (2 << 20), "no such file has more than"),
    "config that is no JSON": text(CONFIG, "{'r': 4}", "does not hold valid JSON"),
    "config that is a list": text(CONFIG, "[1, 2]", "holds a list"),
    "config that is no text": text(CONFIG, b"\xff\xfe\x00{}", CONFIG),
    "deep config": text(CONFIG, '{"r":' * 10**5 + "1" + "}" * 10**5, "does not hold valid JSON"),
    "duplicate fields": text(CONFIG, '{"r": 4, "r": 8}', "lists 'r' twice"),
    "no r": config("r is missing", r=None),
    "r of 0": config("ranks are from 1 to 512", r=0),
    "r of -1": config("ranks are from 1 to 512", r=-1),
    "r of 2^40": config("ranks are from 1 to 512", r=2**40),
    "r in words": config("r is '8'", r="8"),
    "true r": config("r is True", r=True),
    "alpha NaN": config("it must be finite", lora_alpha=math.nan),
    "alpha 1e308": config("it must be finite", lora_alpha=1e308),
    "alpha in words": config("lora_alpha is '8'", lora_alpha="8"),
    "IA3": config("type LORA only", peft_type="IA3"),
    "endless pattern": config("repeats something else", rank_pattern={"(a+)+$": 4}),
    "wide pattern": config("too many or too wide", rank_pattern={"(a|a)" * 45: 4}),
    "10^5 patterns": config("no such file has more than", rank_pattern={f"key{i}": 4 for i in range(10**5)}),
    "many patterns": config("at most 4096 are read", alpha_pattern={f"key{i}": 4 for i in range(10**4)}),
    "only a pickle": (only_pickle, "a pickle, which Quire never opens"),
    "a pickle beside": text("adapter_model.bin", BOMB, LOADS),
    "code beside": text("modeling.py", "raise SystemExit('owned')", LOADS),
    "header beyond the file": text(TENSORS, struct.pack("<Q", 1 << 40) + b"{}", "is truncated"),
    "header of 200 MB": (sparse_header, "has a header of 209715200 bytes"),
    "empty file": text(TENSORS, b"", "is truncated"),
    "overlapping ranges": header(moved(f"{Q}.lora_B.weight", -4), "overlaps the one before it"),
    "offset beyond the end": header(moved(f"{Q}.lora_B.weight", 1 << 30), "gap"),
    "offset in words": header(lambda h: h[f"{Q}.lora_A.weight"].update(data_offsets=["0", "1"]), "must be sizes"),
    "type that is a list": header(lambda h: h[f"{Q}.lora_A.weight"].update(dtype=[]), "has dtype []"),
    "shape of 10^5 dimensions": header(lambda h: h[f"{Q}.lora_A.weight"].update(shape=[9] * 10**5), "must be sizes"),
    "truncated data": (cut, "is truncated"),
    "A without B": one(f"{Q}.lora_B.weight", None, "has no counterpart lora_B"),
    "B without A": one(f"{Q}.lora_A.weight", None, "has no counterpart lora_A"),
    "rank of A": content(bent("rank of A"), "it must be [4, 48]"),
    "rank of both": content(bent("rank of both"), "with rank 4 of adapter_config.json"),
    "transposed A": content(bent("transposed"), "it must be [4, 48]"),
    "other inputs": content(bent("inputs"), "has shape [4, 64]"),
    "other outputs": content(bent("outputs"), "has shape [64, 4]"),
    "A that is a vector": content(bent("a vector"), "a factor is a matrix"),
    "A without rows": content(bent("no rows"), "a factor is a matrix"),
    "rank beyond the bound": (lambda path: void(write_adapter(path, r=128)), "--max-lora-rank is 64"),
    "unknown module": content(called(f"{PREFIX}model.layers.0.self_attn.q_proj_2"), "did you mean q_proj?"),
    "layer 99 of 3": content(called(f"{PREFIX}model.layers.99.self_attn.q_proj"), "which the model does not have"),
    "no tensors": content(lambda _: {"x.lora_C": RAW}, "it is no factor"),
    "integers": one(f"{Q}.lora_A.weight", RAW, "is I32; factors are F32, F16, BF16"),
    "float8": header(
        lambda h: h[f"{Q}.lora_A.weight"].update(dtype="F8_E4M3", shape=[16, 48]), "is F8_E4M3; factors are"
    ),
    "NaN": content(holding(math.nan), "q_proj.lora_B.weight holds NaN or infinity"),
    "infinity": content(holding(math.inf, f"{Q}.lora_A.weight"), "q_proj.lora_A.weight holds NaN or infinity"),
    "q under two prefixes": content(also("model.layers.0.self_attn.q_proj"), "is stored twice"),
    "q of a bare decoder, too": content(also(f"{PREFIX}layers.0.self_attn.q_proj"), "are the same matrix"),
    "packed and child names": content(also(f"{PREFIX}model.layers.0.self_attn.qkv_proj"), "which the model does not"),
    "another vocabulary": one(
        f"{PREFIX}lm_head.base_layer.weight", np.ones((400, 48), np.float32), "with a vocabulary of their own"
    ),
    "a table for another vocabulary": content(
        lambda found: {
            **found,
            f"{PREFIX}model.embed_tokens.lora_embedding_A": np.ones((4, 400), np.float32),
            f"{PREFIX}model.embed_tokens.lora_embedding_B": np.ones((48, 4), np.float32),
        },
        "has shape [4, 400]",
    ),
    "whole lm_head": config("modules_to_save is ['lm_head']", modules_to_save=["lm_head"]),
    "whole lm_head, unsaid": one(f"{PREFIX}lm_head.weight", np.ones((384, 48), np.float32), "whole modules"),
    "a vector of DoRA": one(f"{Q}.lora_magnitude_vector", np.ones(48, np.float32), "DoRA"),
    "DoRA": config("DoRA", use_dora=True),
    "a bias of another": one(f"{Q}.lora_B.bias", np.ones(24, np.float32), "the module has 48 outputs"),
    "a bias alone": one(f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.bias", np.ones(80, np.float32), "no counterpart"),
    "a bias of A": one(f"{Q}.lora_A.bias", np.ones(4, np.float32), "it is no factor"),
    "NaN in a bias": one(f"{Q}.lora_B.bias", np.full(48, np.nan, np.float32), "holds NaN or infinity"),
    "a name of 10^6 characters": header(lambda h: {"x" * 10**6: next(iter(h.values()))}, TENSORS),
    "config of another": link(CONFIG, "../../outside/secret.json", "outside the adapter's folder"),
    "tensors of another": link(TENSORS, "/etc/passwd", "outside the adapter's folder"),
    "dangling link": link(TENSORS, "nowhere", "is missing"),
    "pipe as config": pipe(CONFIG),
    "pipe as tensors": pipe(TENSORS),
    "10^6 tensors": (many_tensors, "has a header of"),
}


LARGE = ("10^6 tensors", "header of 200 MB")


def write_all(root: Path, without: Collection[str] = ()) -> dict[str, Path]:
    """Writes all of them below `root`; returns their directories."""
    (root / "outside").mkdir()
    (root / "outside" / "secret.json").write_text(json.dumps({"peft_type": SECRET}))
    made = {}
    for i, (name, (spoil, _)) in enumerate(BAD.items()):
        if name in without:
            continue
        made[name] = write_adapter(root / "repositories" / str(i))
        spoil(made[name])
    return made
