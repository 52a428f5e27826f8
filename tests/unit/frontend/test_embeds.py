"""Prompt embeddings as a user sends them: files and arrays that are read, and those that are refused."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from base64 import b64encode
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from quire.errors import PromptTooLongError, ValidationError
from quire.frontend.embeds import EmbedsReader

HIDDEN, MAX_LEN = 8, 16
READER = EmbedsReader(HIDDEN, MAX_LEN)
ROWS = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(np.float32)


def text(data: bytes) -> str:
    return b64encode(data).decode()


def npy(array: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def header(fields: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(body)) + body + data


def torch_file() -> bytes:
    file = io.BytesIO()
    torch.save(torch.zeros(2, HIDDEN), file)
    return file.getvalue()


def zip_file() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", b"")
    return file.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_numpy_files_are_read(version: tuple[int, int], dtype: str) -> None:
    array = ROWS.astype(dtype)
    found = READER.read(READER.decode(text(npy(array, version))))
    assert found.dtype == np.float32
    assert (found == array).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_and_tensors_are_read(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(ROWS).to(dtype)
    for found in (
        READER.read(READER.decode(text(save_torch({"any name": tensor})))),
        READER.read(tensor),
        READER.read(tensor[None]),
    ):
        assert torch.equal(torch.from_numpy(found), tensor.float())


def test_an_array_is_copied() -> None:
    array = ROWS.copy()
    found = READER.read(array)
    array[:] = 0
    assert (found == ROWS).all()
    assert (READER.read(ROWS.astype(np.float64)) == ROWS).all()
    assert (READER.read(ROWS.tolist()) == ROWS).all()


F4 = {"dtype": "F32", "shape": [1, HIDDEN], "data_offsets": [0, 4 * HIDDEN]}
REFUSED: dict[str, tuple[str, str]] = {
    "no base64": ("&&&&", "is no base64"),
    "empty": ("", "is neither"),
    "too long": ("A" * (4 * MAX_LEN * HIDDEN + (1 << 16)) * 2, "characters of base64"),
    "a torch file": (text(torch_file()), r"send safetensors.torch.save"),
    "a zip": (text(zip_file()), "never opened"),
    "a pickle": (text(b"\x80\x04K\x01."), "never opened"),
    "no file": (text(b"hello there, this is text"), "is neither"),
    "two tensors": (text(save({"a": ROWS, "b": ROWS})), "holds 2 tensors"),
    "no tensor": (text(header({})), "holds 0 tensors"),
    "integers": (text(save({"a": ROWS.astype(np.int32)})), "holds I32"),
    "float64": (text(save({"a": ROWS.astype(np.float64)})), "holds F64"),
    "one dimension": (text(save({"a": ROWS[0]})), "has the shape"),
    "another width": (text(save({"a": ROWS[:, 1:]})), r"\[number of positions, 8\]"),
    "no rows": (text(save({"a": ROWS[:0]})), "has the shape"),
    "four dimensions": (text(save({"a": ROWS[None, None]})), "has the shape"),
    "a header beyond the file": (text(struct.pack("<Q", 1 << 40) + b"{}"), "is neither"),
    "a header that is no JSON": (text(header(b"{]")), "is neither"),
    "data that is cut off": (text(header({"a": F4}, b"\0" * 7)), "is neither"),
    "offsets beyond the end": (text(header({"a": F4 | {"data_offsets": [0, 1 << 50]}}, b"\0" * 32)), "is neither"),
    "a shape that overflows": (text(header({"a": F4 | {"shape": [1 << 40, 1 << 40]}}, b"\0" * 32)), "is neither"),
    "NaN": (text(save({"a": np.full_like(ROWS, np.nan)})), "NaN or infinity"),
    "infinity": (text(npy(np.full_like(ROWS, np.inf))), "NaN or infinity"),
    "objects": (text(npy(np.array([[{}] * HIDDEN], object))), "is a .npy file of object"),
    "structs": (text(npy(np.zeros(3, [("x", "<f4")]))), "is a .npy file of"),
    "Fortran order": (text(npy(np.asfortranarray(ROWS))), "in Fortran order"),
    "version 3": (text(npy(ROWS, (3, 0))), "version 3.0"),
    "npy cut off": (text(npy(ROWS)[:-1]), "which are not"),
    "npy with a header of code": (
        text(npy(ROWS).replace(b"'<f4'", b"f(), ", 1)),
        "is no readable .npy file",
    ),
    "npy with a large shape": (text(npy(ROWS).replace(b"(5, 8)", b"(55,8)")), "which are not"),
}


@pytest.mark.parametrize(("payload", "words"), REFUSED.values(), ids=REFUSED)
def test_hostile_payloads_are_refused(payload: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as e:
        READER.read(READER.decode(payload))
    assert e.value.param == "prompt_embeds"


def test_a_prompt_that_fills_the_context_is_too_long() -> None:
    assert len(READER.read(np.zeros((MAX_LEN - 1, HIDDEN)))) == MAX_LEN - 1
    with pytest.raises(PromptTooLongError, match="has 16 positions and the context 16"):
        READER.read(np.zeros((MAX_LEN, HIDDEN)))


@pytest.mark.parametrize("value", ["text", 5, {}, [[1, [2]]], [["a"] * HIDDEN], np.zeros((2, HIDDEN), bool)], ids=str)
def test_what_is_no_array_of_floats_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        READER.read(value)
