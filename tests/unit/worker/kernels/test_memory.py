"""Memory for packed weights and the KV cache."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.worker.kernels.memory import take_memory

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
    """Of its mapping, which the system may have joined with neighbours."""
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
