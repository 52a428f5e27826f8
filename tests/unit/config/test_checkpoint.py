"""Safetensors headers: good ones are understood, bad ones refused in one line that names file and tensor."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.checkpoint import MAX_HEADER_BYTES, CheckpointIndex, read_header
from quire.errors import ModelLoadError

Tensors = dict[str, tuple[str, list[int], int, int]]
"""Name to (dtype, shape, begin, end)."""
GOOD: Tensors = {"a": ("F32", [2, 3], 0, 24), "b": ("BF16", [4], 24, 32)}


def write(path: Path, tensors: Tensors | bytes, data_bytes: int, header_bytes: int | None = None) -> Path:
    """A safetensors file whose header says whatever the test wants."""
    if isinstance(tensors, bytes):
        header = tensors
    else:
        entries = {n: {"dtype": d, "shape": s, "data_offsets": [b, e]} for n, (d, s, b, e) in tensors.items()}
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    size = len(header) if header_bytes is None else header_bytes
    path.write_bytes(struct.pack("<Q", size) + header + bytes(data_bytes))
    return path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refusal(folder: Path) -> str:
    """The message of the error that reading `folder` must raise: one line, quickly."""
    start = time.thread_time()
    with pytest.raises(ModelLoadError) as caught:
        CheckpointIndex.from_dir(folder)
    assert time.thread_time() - start < 1.0
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_a_file_is_indexed_from_its_header(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", GOOD, 32)
    index = CheckpointIndex.from_dir(tmp_path)
    assert {n: (t.dtype, t.shape, t.offset, t.nbytes) for n, t in index.tensors.items()} == {
        "a": ("F32", (2, 3), 0, 24),
        "b": ("BF16", (4,), 24, 8),
    }
    assert index.total_bytes == 32
    assert index.main_dtype == "F32"
    assert index.tensors["a"].file == tmp_path / "model.safetensors"


def test_shards_are_indexed_together(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"a": ("F16", [2], 0, 4)}, 4)
    write(tmp_path / "two.safetensors", {"b": ("F16", [3], 0, 6)}, 6)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    index = CheckpointIndex.from_dir(tmp_path)
    assert {n: t.file.name for n, t in index.tensors.items()} == {"a": "one.safetensors", "b": "two.safetensors"}
    assert index.total_bytes == 10


@given(
    st.lists(
        st.tuples(st.sampled_from(["F32", "BF16", "I64", "U8"]), st.lists(st.integers(0, 4), max_size=3)), max_size=6
    )
)
def test_reads_what_safetensors_writes(tmp_path_factory: pytest.TempPathFactory, specs: list[Any]) -> None:
    """Every file that the reference implementation writes is accepted and read the same."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}
    path = tmp_path_factory.mktemp("s") / "model.safetensors"
    save_file({f"t{i}": torch.zeros(shape, dtype=dtypes[d]) for i, (d, shape) in enumerate(specs)}, path)
    found = read_header(path)
    with safe_open(path, "pt") as file:
        expected = {k: (file.get_slice(k).get_dtype(), tuple(file.get_slice(k).get_shape())) for k in file.keys()}  # noqa: SIM118  # not a dict
    assert {k: (t.dtype, t.shape) for k, t in found.items()} == expected


@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes
) -> None:
    path = write(tmp_path_factory.mktemp("s") / "model.safetensors", GOOD, 32)
    content = bytearray(path.read_bytes())
    content[at : at + len(noise)] = noise
    path.write_bytes(content)
    with contextlib.suppress(ModelLoadError):
        read_header(path)


BAD_HEADERS: list[tuple[Tensors | bytes, int, str]] = [
    (GOOD, 31, "truncated: tensor b ends at byte 32"),
    (GOOD, 33, "1 bytes after its last tensor"),
    ({"a": ("F32", [2, 3], 0, 20)}, 20, "tensor a is F32.* needs 24 bytes, but its byte range 0..20 holds 20"),
    ({"a": ("Q4", [2], 0, 8)}, 8, "tensor a has dtype 'Q4'"),
    ({"a": ("U8", [-2, -2], 0, 4)}, 4, "tensor a has shape"),
    ({"a": ("U8", [True], 0, 1)}, 1, "tensor a has shape"),
    ({"a": ("U8", [4], 4, 0)}, 4, "tensor a is U8"),
    ({"a": ("U8", [4], 0, 4), "b": ("U8", [4], 2, 6)}, 6, "tensor b at byte 2 overlaps"),
    ({"a": ("U8", [4], 0, 4), "b": ("U8", [4], 8, 12)}, 12, "tensor b at byte 8 leaves a gap"),
    (b'{"a": {"dtype": "U8", "shape": [1]}}', 1, "tensor a has no dtype, shape and data_offsets"),
    (b'{"a": 3}', 1, "tensor a has no dtype, shape and data_offsets"),
    (b'{"a": {}, "a": {}}', 1, "lists 'a' twice"),
    (b"[]", 0, "holds a list"),
    (b"{oops", 0, "valid JSON"),
    (b"\xff\xfe", 0, "valid JSON"),
    (b"[" * 100_000, 0, "valid JSON"),
]


@pytest.mark.parametrize(("tensors", "data_bytes", "message"), BAD_HEADERS, ids=[b[2] for b in BAD_HEADERS])
def test_a_damaged_header_names_its_file(
    tensors: Tensors | bytes, data_bytes: int, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.safetensors", tensors, data_bytes)
    with pytest.raises(ModelLoadError, match=message):
        CheckpointIndex.from_dir(tmp_path)
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 9) + b"{}"])
def test_shorter_than_its_header(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "truncated or not a safetensors file" in refusal(tmp_path)


def test_huge_header_is_not_read(tmp_path: Path) -> None:
    """Neither a length beyond the file nor one beyond the format's limit makes us allocate it."""
    path = write(tmp_path / "model.safetensors", b"{}", 0, header_bytes=2**63)
    assert "truncated" in refusal(tmp_path)
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(path, MAX_HEADER_BYTES + 100)  # sparse
    assert f"the limit is {MAX_HEADER_BYTES}" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "one.safetensors"})
    assert "one.safetensors is missing" in refusal(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"a": ("U8", [1], 0, 1)}, 1)
    write(tmp_path / "two.safetensors", {"b": ("U8", [1], 0, 1)}, 1)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    assert "two.safetensors does not hold tensor c" in refusal(tmp_path)
    write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors"})
    assert "does not hold tensor a" in refusal(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", {"a": ("U8", [1], 0, 1)}, 1)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert "two.safetensors: tensor a is also in one.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_index_without_a_map(weight_map: Any, tmp_path: Path) -> None:
    write_index(tmp_path, weight_map)
    assert "has no weight_map" in refusal(tmp_path)


@pytest.mark.parametrize(
    "file_name", ["../out.safetensors", "x/../../out.safetensors", "{parent}/out.safetensors", "..\\out"]
)
def test_index_cannot_leave_the_folder(file_name: str, tmp_path: Path) -> None:
    write(tmp_path / "out.safetensors", {"a": ("U8", [1], 0, 1)}, 1)
    folder = tmp_path / "model"
    folder.mkdir()
    write_index(folder, {"a": file_name.format(parent=tmp_path)})
    assert "outside the checkpoint's folder" in refusal(folder)


def test_links_cannot_leave_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "out.safetensors", {"a": ("U8", [1], 0, 1)}, 1)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "out.safetensors")
    assert "outside the checkpoint's folder" in refusal(folder)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """snapshots/<revision>/model.safetensors -> ../../blobs/<digest>."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write(blobs / "beef", {"a": ("U8", [1], 0, 1)}, 1)
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    assert set(CheckpointIndex.from_dir(snapshot).tensors) == {"a"}
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "out.safetensors")
    write(tmp_path / "out.safetensors", {"a": ("U8", [1], 0, 1)}, 1)
    assert "outside the checkpoint's folder" in refusal(snapshot)


def test_dangling_link_and_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert "model.safetensors is missing" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refusal(tmp_path)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    assert "no weights" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    message = refusal(tmp_path)
    assert "only pytorch_model.bin, a pickle, which Quire never opens" in message
    assert "save_pretrained" in message
