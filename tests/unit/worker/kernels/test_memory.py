"""Memory for packed weights and the KV cache."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.packs import LARGE_BYTES, MAX_FREE_BLOCKS, ResultMemory, take_memory
from quire.worker.kernels.specs import LOGITS

HUGE = 2 << 20
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(memory: Tensor) -> str:
    """The entry of /proc/self/smaps that the middle of `memory` lies in."""
    address = memory.data_ptr() + memory.numel() // 2
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(bound, 16) for bound in entry.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return entry
    raise AssertionError("memory that the system does not know")


def resident_bytes(memory: Tensor) -> int:
    """Returns the resident bytes of a tensor's mapping, which the system may have joined with neighbours."""
    return int(re.findall(r"^Rss:\s+(\d+) kB", mapping_of(memory), re.MULTILINE)[0]) << 10


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, HUGE + 1])
def test_memory_is_zeros_of_the_size_asked(num_bytes: int) -> None:
    memory = take_memory(num_bytes)
    assert memory.dtype == torch.uint8
    assert memory.shape == (num_bytes,)
    assert not memory.any()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_committed_as_it_is_written() -> None:
    memory = take_memory(64 * HUGE)
    before = resident_bytes(memory)
    memory[: HUGE // 2] = 1
    assert HUGE // 2 <= resident_bytes(memory) - before <= 4 * HUGE


@pytest.mark.skipif(not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="no huge pages here")
@pytest.mark.parametrize("huge_pages", [True, False])
def test_who_asks_gets_huge_pages(huge_pages: bool) -> None:
    memory = take_memory(8 * HUGE, huge_pages=huge_pages)
    memory.fill_(1)
    entry = mapping_of(memory)
    assert entry.split(" ")[1] == "rw-p", "shared memory follows another switch"
    assert re.search(rf"^THPeligible:\s+{int(huge_pages)}$", entry, re.MULTILINE)
    assert re.search(r"^VmFlags:.* %s\b" % ("hg" if huge_pages else "nh"), entry, re.MULTILINE)


def test_a_large_result_takes_the_place_of_one_that_is_gone() -> None:
    memory = ResultMemory()
    first = memory.take((LARGE_BYTES, 2), torch.uint8)
    address = first.data_ptr()
    second = memory.take((LARGE_BYTES,), torch.uint8)
    assert second.data_ptr() != address, "the first one is still in use"
    view = first[5:]
    del first
    assert memory.take((LARGE_BYTES,), torch.uint8).data_ptr() != address, "a view of it is in use"
    del view
    again = memory.take((LARGE_BYTES // 4, 2), torch.float32)
    assert again.data_ptr() == address
    assert again.shape == (LARGE_BYTES // 4, 2)
    assert again.dtype == torch.float32


def test_few_blocks_are_kept_and_none_after_release() -> None:
    memory = ResultMemory()
    results = [memory.take((size * LARGE_BYTES,), torch.uint8) for size in (3, 1, 4, 2)]
    addresses = [result.data_ptr() for result in results]
    del results
    assert len(memory._free) == MAX_FREE_BLOCKS
    assert memory.take((LARGE_BYTES,), torch.uint8).data_ptr() == addresses[0], "the smaller of the largest two"
    memory.release()
    assert not memory._free


def test_the_logits_of_each_step_lie_where_those_of_the_step_before_did(library: NativeLibrary) -> None:
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))
    head = kernels.linear(torch.ones(1024, 64, dtype=torch.bfloat16), None, LOGITS)
    x = torch.ones(LARGE_BYTES // 4096, 64, dtype=torch.bfloat16)
    logits = head(x)
    address = logits.data_ptr()
    assert torch.equal(logits, torch.full((len(x), 1024), 64.0))
    other = head(x)
    assert other.data_ptr() != address, "logits that are in use are left alone"
    del logits
    assert [head(x).data_ptr() for _ in range(3)] == [address] * 3
    kernels.release_memory()
    assert not kernels.context.result_memory._free
