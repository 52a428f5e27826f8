"""Packed weights that a start finds as an earlier one left them: the same model, bit for bit, or packed again."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.config.engine_args import EngineArgs
from quire.config.quantization import WEIGHT_BITS
from quire.worker.kernels.library import Context, native_library
from quire.worker.kernels.native import Matrix, NativeKernels
from quire.worker.kernels.native_quantized import QuantizedMatrix
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.weights import weight_bytes
from quire.worker.loader import ModelWeights, Placement, WeightCache, load_model
from quire.worker.loader import packed as packed_module
from quire.worker.loader import stored as stored_module
from quire.worker.loader.stored import StoredMatrix
from quire.worker.packed_cache import PackedCache, PackedFileWriter, open_packed_file
from quire.worker.quantization import weight as rounding

from ..models.oracle import quire_logits
from ..quantization.writers import (
    AWQ_CONFIG,
    FP8_CONFIG,
    GPTQ_CONFIG,
    awq,
    compressed_config,
    compressed_packed,
    float8,
    gptq,
    mxfp4_checkpoint,
    quantize_checkpoint,
    random_float8,
    random_weight,
)

Make = Callable[..., Path]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(native_library() is None, reason="there are no native kernels here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedCache:
    """Returns a cache directory of this test alone."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_module, "SETTLED_S", -1.0)
    return PackedCache.default()


class Start:
    """A model, loaded as a worker loads it."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16, **flags: Any) -> None:
        config = EngineArgs(str(path), **flags).create_engine_config()
        library = native_library()
        assert library is not None
        kernels = NativeKernels(Context(library, 2, "portable"))
        placement = Placement(CPU, dtype, kernels)
        self.cache = WeightCache(config.model_config, config.load_config)
        self.model = load_model(config.model_config, config.load_config, placement, self.cache)
        self.weights = ModelWeights(self.model, config.model_config, config.load_config, placement, self.cache)

    @property
    def is_mapped(self) -> bool:
        return self.cache.mapped_bytes > 0

    def end(self) -> Start:
        self.cache.close()
        return self

    def content(self) -> dict[str, Tensor]:
        """Every packed matrix as it was, every table, and every parameter that is no matrix."""
        found = {name: p.clone() for name, p in self.model.named_parameters() if not p.is_meta}
        for path, module in self.model.named_modules():
            found |= {f"{path}/{i}": tensor for i, tensor in enumerate(packed_tensors(module))}
        return found


def packed_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields what a module's kernels have packed, as bytes."""
    kernels = [kernel for name, kernel in vars(module).items() if name.startswith("_kernel") and kernel is not None]
    while kernels:
        kernel = kernels.pop()
        if isinstance(kernel, list | tuple):
            kernels += kernel
        elif isinstance(kernel, Matrix):
            yield kernel.data.clone()
        elif isinstance(kernel, QuantizedMatrix):
            parts = (kernel.values, kernel.scales, kernel.zeros, kernel.corrections)
            yield from (part.clone() for part in parts if part is not None)
        elif isinstance(kernel, Tensor) and kernel.dtype == torch.uint8:
            yield kernel.clone()
        elif type(kernel).__module__.startswith("quire.worker.kernels.native"):
            kernels += vars(kernel).values()


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "opt", "qwen2"])
def test_the_second_start_maps_what_the_first_packed(
    tiny_checkpoint: Make, cache: PackedCache, family: str, dtype: torch.dtype
) -> None:
    first = Start(tiny_checkpoint(family), dtype).end()
    assert not first.is_mapped
    (file,) = cache.files()
    second = Start(tiny_checkpoint(family), dtype)
    assert second.is_mapped
    assert second.cache.mapped_bytes == file.stat().st_size
    content = first.content()
    assert sum(tensor.dtype == torch.uint8 for tensor in content.values()) > 4
    assert same(content, second.content())
    assert cache.files() == [file]


def write_stored(source: Path, target: Path, method: str) -> Path:
    """A quantized checkpoint."""
    if method == "mxfp4":
        return mxfp4_checkpoint(source, target)[0]
    zeros4 = functools.partial(random_weight, bits=4, group_size=32, zeros=True)
    plain4 = functools.partial(random_weight, bits=4, group_size=32, zeros=False)
    write: dict[str, tuple[Any, Any, Any]] = {
        "fp8": (functools.partial(random_float8, rows=16, columns=32), functools.partial(float8, rows=16), FP8_CONFIG),
        "gptq": (zeros4, gptq, GPTQ_CONFIG),
        "awq": (zeros4, awq, AWQ_CONFIG),
        "compressed-tensors": (plain4, compressed_packed, compressed_config("pack-quantized", 4, "group", False)),
    }
    return quantize_checkpoint(source, target, *write[method])[0]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *itertools.product(["llama", "mixtral"], ["int8", "int4", "gptq", "awq", "compressed-tensors", "fp8"]),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_the_second_start_maps_what_the_first_quantized(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, method: str
) -> None:
    path, flags = tiny_checkpoint(family, hidden_size=64, intermediate_size=96), {}
    if method in WEIGHT_BITS:
        flags["quantization"] = method
    else:
        path = write_stored(path, tmp_path, method)
    first = Start(path, **flags).end()
    assert not first.is_mapped
    for name in ("quantize_int8", "quantize_int4"):
        monkeypatch.setattr(rounding, name, unwanted)
    monkeypatch.setattr(StoredMatrix, "read", unwanted)
    second = Start(path, **flags)
    assert second.is_mapped
    assert same(first.content(), second.content())
    assert weight_bytes(first.model) == weight_bytes(second.model) < weight_bytes_of_plain(tiny_checkpoint, family)
    tokens = [7, 100, 30, 200, 9]
    assert torch.equal(quire_logits(second.model, tokens), quire_logits(first.model, tokens))
    monkeypatch.undo()


def unwanted(*_: object, **__: object) -> None:
    raise AssertionError("what is packed already is read and quantized again")


def weight_bytes_of_plain(tiny_checkpoint: Make, family: str) -> int:
    path = tiny_checkpoint(family, hidden_size=64, intermediate_size=96)
    return weight_bytes(Start(path, weight_cache=False).model)


def test_each_way_to_quantize_has_a_file_of_its_own(tiny_checkpoint: Make, cache: PackedCache) -> None:
    path = tiny_checkpoint("llama")
    ways: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"quantization": "int4"}]
    contents = [Start(path, **way).end().content() for way in ways]
    assert len(cache.files()) == len(ways)
    for way, content in zip(ways, contents, strict=True):
        again = Start(path, **way)
        assert again.is_mapped
        assert same(content, again.content())


@pytest.mark.parametrize("damage", ["one byte short", "half of it", "empty", "its table", "its header", "its kinds"])
def test_a_damaged_file_of_quantized_weights_is_packed_again(
    tiny_checkpoint: Make, tmp_path: Path, cache: PackedCache, damage: str
) -> None:
    path = write_stored(tiny_checkpoint("llama", hidden_size=64, intermediate_size=96), tmp_path, "gptq")
    content = Start(path).end().content()
    (file,) = cache.files()
    size, blobs = file.stat().st_size, open_packed_file(file).blobs
    lengths = {"one byte short": size - 1, "half of it": size // 2, "empty": 0}
    if damage in lengths:
        os.truncate(file, lengths[damage])
    else:
        kinds = next(blob.offset for blob in blobs.values() if blob.num_bytes == stored_module.NUM_BYTES)
        flip_a_bit(file, {"its table": size - 20, "its header": 16, "its kinds": kinds + 8}[damage])
    start = Start(path).end()
    assert not start.is_mapped
    assert same(content, start.content())
    assert Start(path).is_mapped, "the damaged file was replaced"


def flip_a_bit(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


def test_a_mapping_outlives_its_file(tiny_checkpoint: Make, cache: PackedCache) -> None:
    content = Start(tiny_checkpoint("llama")).end().content()
    second = Start(tiny_checkpoint("llama"))
    assert cache.clear() > 0
    assert same(content, second.content())
    second.weights.drop()
    second.weights.restore()
    assert not second.is_mapped, "woken up without the file, it packs again"
    assert same(content, second.content())


def test_sleep_and_new_weights(tiny_checkpoint: Make, cache: PackedCache) -> None:
    start = Start(tiny_checkpoint("llama")).end()
    content, other = start.content(), Start(tiny_checkpoint("llama", seed=1), weight_cache=False).content()
    for _ in range(2):
        start.weights.drop()
        start.weights.restore()
        assert start.is_mapped, "woken up, it maps what it had packed"
        assert same(content, start.content())
        start.weights.replace(tiny_checkpoint("llama", seed=1))
        assert not start.is_mapped
        assert same(other, start.content())
        assert len(cache.files()) == 1, "new weights in a running engine are not kept"
        start.weights.replace(tiny_checkpoint("llama"))
        assert same(content, start.content())


def overwrite(path: Path, source: Path) -> None:
    """Other weights in the same file, with the times it had."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(source.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_overwritten_in_place_is_another_one(tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    Start(path).end()
    assert Start(path).is_mapped
    weights, before = path / "model.safetensors", (path / "model.safetensors").stat()
    overwrite(weights, tiny_checkpoint("llama", seed=1) / "model.safetensors")
    after = weights.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (before.st_size, before.st_ino, before.st_mtime_ns)
    start = Start(path)
    assert not start.is_mapped
    assert same(start.content(), Start(tiny_checkpoint("llama", seed=1), weight_cache=False).content())


def test_a_checkpoint_that_is_moved_is_the_same(tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    Start(path).end()
    assert Start(path.rename(tmp_path / "elsewhere")).is_mapped


@pytest.mark.parametrize(
    "flags", [{"dtype": torch.float32}, {"hf_overrides": {"rms_norm_eps": 0.5}}, {"weight_cache": False}]
)
def test_what_is_packed_otherwise_is_not_mapped(tiny_checkpoint: Make, flags: dict[str, Any]) -> None:
    Start(tiny_checkpoint("llama")).end()
    assert not Start(tiny_checkpoint("llama"), **flags).is_mapped


def test_a_fresh_checkpoint_may_still_be_being_written(
    tiny_checkpoint: Make, cache: PackedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "SETTLED_S", 3600.0)
    Start(Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))).end()
    assert cache.files() == []


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    tiny_checkpoint: Make, cache: PackedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    monkeypatch.setattr(
        packed_module.CacheWriter,
        "__init__",
        with_side_effect(lambda: os.utime(path / "model.safetensors", (9e8, 9e8))),
    )
    Start(path).end()
    assert cache.files() == []


def with_side_effect(effect: Callable[[], object]) -> Callable[..., None]:
    real = packed_module.CacheWriter.__init__

    def init(self: packed_module.CacheWriter, *args: Any) -> None:
        effect()
        real(self, *args)

    return init


def test_a_damaged_file_is_packed_again(tiny_checkpoint: Make, cache: PackedCache) -> None:
    content = Start(tiny_checkpoint("llama")).end().content()
    (file,) = cache.files()
    os.truncate(file, file.stat().st_size - 1)
    start = Start(tiny_checkpoint("llama")).end()
    assert not start.is_mapped
    assert same(content, start.content())
    assert Start(tiny_checkpoint("llama")).is_mapped, "the damaged file was replaced"


def test_a_file_that_lacks_a_layer_is_not_trusted(tiny_checkpoint: Make, cache: PackedCache) -> None:
    content = Start(tiny_checkpoint("llama")).end().content()
    (path,) = cache.files()
    found = open_packed_file(path)
    writer = PackedFileWriter(path, found.key, found.source)
    names = list(found.blobs)
    for name in names[:-1]:
        blob = found.blobs[name]
        writer.add(name, memoryview(found.memory[blob.offset : blob.offset + blob.num_bytes]))
    writer.commit()
    start = Start(tiny_checkpoint("llama"))
    assert same(content, start.content())


@pytest.mark.parametrize("failure", ["no directory", "a full disk", "no room"])
def test_a_cache_that_cannot_be_written_is_done_without(
    tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: PackedCache, failure: str
) -> None:
    if failure == "no directory":
        (tmp_path / "cache").write_text("a file")
    elif failure == "a full disk":

        def add(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(PackedFileWriter, "add", add)
    else:
        monkeypatch.setattr(packed_module, "SPARE_DISK_BYTES", 1 << 60)
    start = Start(tiny_checkpoint("llama")).end()
    expected = Start(tiny_checkpoint("llama"), weight_cache=False).content()
    assert same(expected, start.content())
    assert cache.files() == []
    assert not list(tmp_path.glob("cache/packed/*"))


def test_giving_weights_back_stops_the_writer(
    tiny_checkpoint: Make, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module.CacheWriter, "finish", lambda self: None)  # it waits for more
    start = Start(tiny_checkpoint("llama"))
    start.weights.drop()
    assert not list(cache.directory.glob("*"))
    start.weights.restore()
    assert not start.is_mapped


def test_torch_kernels_pack_nothing(tiny_checkpoint: Make, cache: PackedCache) -> None:
    config = EngineArgs(str(tiny_checkpoint("llama"))).create_engine_config()
    weight_cache = WeightCache(config.model_config, config.load_config)
    placement = Placement(CPU, torch.float32, TORCH_KERNELS)
    load_model(config.model_config, config.load_config, placement, weight_cache)
    assert cache.files() == []


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = {id(record): record for record in caplog.records if record.levelname == "WARNING"}.values()
    return record.getMessage()


def test_a_cache_that_cannot_be_written_is_a_warning_with_its_reason(
    tiny_checkpoint: Make, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_module.os, "access", lambda path, mode: False)  # tests may run as root
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(packed_module.shutil, "disk_usage", lambda path: full)
    start = Start(tiny_checkpoint("llama")).end()
    assert not start.is_mapped
    assert cache.files() == []
    assert "cannot be written to), so that each start packs them again; set QUIRE_CACHE_ROOT" in warnings_of(caplog)


def test_a_full_disk_is_a_warning_with_its_reason(
    tiny_checkpoint: Make, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 29))
    Start(tiny_checkpoint("llama")).end()
    assert cache.files() == []
    assert "(0.5 GiB are left of 1.0 needed)" in warnings_of(caplog)


def test_a_writer_that_fails_is_a_warning_with_its_reason(
    tiny_checkpoint: Make, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(packed_module.PackedFileWriter, "add", fail)
    Start(tiny_checkpoint("llama")).end()
    assert cache.files() == []
    assert "(Read-only file system), so that each start packs them again" in warnings_of(caplog)
