"""The files of a model repository, and what its safetensors headers say. No tensor is read and no torch imported.

A file is read only if it is a regular file, lies inside the repository's folder (or, in the hub's cache, inside the
repository's part of it, whose snapshots are links to blobs), and is no larger than its kind can be. Without this check
a pipe named config.json would be read for ever, and a link would show another file of the machine.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range), and the
bytes of all tensors without gaps (https://github.com/huggingface/safetensors, "Format"). Everything a header says is
checked against the file before it is used.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import ModelLoadError

MAX_JSON_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 512 << 20


def checked_path(directory: Path, name: str, *, source: Path | None = None) -> Path:
    """Returns `directory/name`, which must exist. `source` is the file that names it. Raises ModelLoadError."""
    path = directory / name
    _check_inside(name, source or directory)
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError):
        needs = f"; {source.name} needs it" if source is not None else ""
        raise ModelLoadError(f"{path} is missing{needs}: download the checkpoint again") from None
    if not any(target.is_relative_to(root) for root in _allowed_roots(directory)):
        raise ModelLoadError(
            f"{path} is a link to {target}, outside the checkpoint's folder; put the file itself there"
        )
    if not stat.S_ISREG(mode):
        raise ModelLoadError(f"{path} is not a regular file")
    return path


def _check_inside(name: str, source: Path | str) -> None:
    if "\\" in name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelLoadError(f"{source} names the file {name!r}, which is outside the checkpoint's folder")


def find_file(directory: Path, name: str, max_bytes: int) -> Path | None:
    """Returns the path of a file, None if it is absent; it must not be larger than `max_bytes`. Raises
    ModelLoadError."""
    path = directory / name
    if not path.exists() and not path.is_symlink():
        return None
    checked_path(directory, name)
    size = path.stat().st_size
    if size > max_bytes:
        raise ModelLoadError(f"{path} has {size} bytes; no such file has more than {max_bytes}")
    return path


def read_text(directory: Path, name: str, max_bytes: int) -> str | None:
    """Returns the text of a file; None if it is absent. Raises ModelLoadError."""
    path = find_file(directory, name, max_bytes)
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ModelLoadError(f"{path} is not UTF-8 text: {e}") from None
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read: {e.strerror}") from None


def read_bytes(directory: Path, name: str, max_bytes: int) -> bytes:
    """Returns the bytes of a file, which must exist. Raises ModelLoadError."""
    path = checked_path(directory, name)
    find_file(directory, name, max_bytes)
    try:
        return path.read_bytes()
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read: {e.strerror}") from None


def read_object(directory: Path, name: str) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None if it is absent. Raises ModelLoadError."""
    text = read_text(directory, name, MAX_JSON_BYTES)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ModelLoadError(f"{directory / name} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{directory / name} holds a {type(value).__name__}, not an object")
    return value


def _allowed_roots(directory: Path) -> list[Path]:
    """Returns the folder, and for a hub snapshot (`models--owner--name/snapshots/revision`) the repository's cache."""
    folder = directory.resolve()
    is_snapshot = folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
    return [folder, folder.parent.parent] if is_snapshot else [folder]


MAX_HEADER_BYTES = 100_000_000
"""Size limit that the format defines."""

MAX_DIMENSIONS, MAX_FILE_BYTES = 16, 1 << 62
"""Bounds of what headers say, so that computing with it takes no time."""
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """Position and type of one tensor. `dtype` is the format's name (F32, BF16, ...); `offset` counts from the end of
    the header."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointIndex:
    """All tensors of a checkpoint by name. `source` is the file that lists them, for messages."""

    tensors: Mapping[str, TensorInfo]
    source: Path

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def main_dtype(self) -> str:
        """The dtype of most of the bytes: the checkpoint's type where config.json names none."""
        nbytes: dict[str, int] = {}
        for tensor in self.tensors.values():
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
        return max(nbytes, key=lambda dtype: nbytes[dtype], default="F32")

    @staticmethod
    def from_dir(model_dir: Path) -> CheckpointIndex:
        """Reads the headers of `model_dir`'s weights. Raises ModelLoadError naming file and tensor."""
        single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
        if single.exists() or single.is_symlink():
            return CheckpointIndex(read_header(checked_path(model_dir, SINGLE_FILE)), single)
        if index.exists() or index.is_symlink():
            checked_path(model_dir, INDEX_FILE)
            return CheckpointIndex(_read_shards(model_dir, index), index)
        raise _no_safetensors(model_dir)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of one safetensors file, checked. Raises ModelLoadError naming the file and the tensor."""
    try:
        with path.open("rb") as file:
            return parse_header(path, file)[0]
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read: {e.strerror}") from None


def parse_header(path: Path, file: BinaryIO, max_bytes: int = MAX_HEADER_BYTES) -> tuple[dict[str, TensorInfo], int]:
    """Returns the tensors of a safetensors file that was opened, checked, and the position of their data. Raises
    ModelLoadError naming `path`, and the tensor, and OSError."""
    file_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    if file_bytes < 8 or header_bytes > file_bytes - 8:
        raise ModelLoadError(
            f"{path} is truncated or not a safetensors file: its header needs {header_bytes} bytes and the "
            f"file has {file_bytes}; download it again"
        )
    if header_bytes > max_bytes:
        raise ModelLoadError(f"{path} has a header of {header_bytes} bytes; the limit is {max_bytes}")
    header = parse_object(path, file.read(header_bytes))
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    _check_layout(path, tensors, file_bytes - 8 - header_bytes)
    return tensors, 8 + header_bytes


def write_outline(directory: Path, name: str, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a safetensors file with this header, whose tensors are holes that take no room on the disk."""
    _check_inside(name, directory)
    header = json.dumps(tensors).encode()
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + max((entry["data_offsets"][1] for entry in tensors.values()), default=0))


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """Parses JSON text to an object without duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            raise ModelLoadError(f"{path} lists {counts.most_common(1)[0][0]!r} twice")
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        if isinstance(e, ModelLoadError):
            raise
        raise ModelLoadError(f"{path} does not hold valid JSON where its list of tensors should be: {e}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__} where its list of tensors should be")
    return value


def _parse_entry(path: Path, name: str, entry: Any) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ModelLoadError(f"{path}: tensor {name} has no dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelLoadError(f"{path}: tensor {name} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    is_list = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    if not is_list or not all(type(n) is int and 0 <= n < MAX_FILE_BYTES for n in [*shape, begin, end]):
        shown = f"{shape!r} at {begin!r}..{end!r}"[:100]
        raise ModelLoadError(f"{path}: tensor {name} has shape {shown}; they must be sizes")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise ModelLoadError(
            f"{path}: tensor {name} is {dtype}{shape} and needs {nbytes} bytes, but its byte range "
            f"{begin}..{end} holds {end - begin}"
        )
    return TensorInfo(name, path, dtype, tuple(shape), begin, nbytes)


def _check_layout(path: Path, tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    """Raises ModelLoadError unless the tensors tile the data: no overlap, no gap, nothing missing at the end."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            what = "overlaps the one before it" if tensor.offset < position else "leaves a gap before it"
            raise ModelLoadError(f"{path}: tensor {name} at byte {tensor.offset} {what} (which ends at {position})")
        position += tensor.nbytes
        if position > data_bytes:
            raise ModelLoadError(
                f"{path} is truncated: tensor {name} ends at byte {position} of the data and the file has only "
                f"{data_bytes}; download it again"
            )
    if position != data_bytes:
        raise ModelLoadError(f"{path} holds {data_bytes - position} bytes after its last tensor; download it again")


def _read_shards(model_dir: Path, index: Path) -> dict[str, TensorInfo]:
    """Reads all shards that the index names; every tensor must be where the index says, and nowhere else."""
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise ModelLoadError(f"{index} has {index.stat().st_size} bytes; the limit is {MAX_HEADER_BYTES}")
    weight_map = parse_object(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelLoadError(f"{index} has no weight_map from tensor names to file names")
    tensors: dict[str, TensorInfo] = {}
    for file_name in sorted(set(weight_map.values())):
        for name, tensor in read_header(checked_path(model_dir, file_name, source=index)).items():
            if name in tensors:
                raise ModelLoadError(f"{tensor.file}: tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != Path(file_name).name:
            raise ModelLoadError(f"{model_dir / file_name} does not hold tensor {name}, which {index.name} puts there")
    return tensors


def _no_safetensors(model_dir: Path) -> ModelLoadError:
    pickles = sorted(p.name for p in model_dir.glob("*.bin"))
    found = f"only {pickles[0]}, a pickle, which Quire never opens" if pickles else "no weights"
    return ModelLoadError(
        f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE} ({found}); convert a pickled checkpoint with: "
        "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('SOURCE')"
        ".save_pretrained('TARGET')\""
    )
