"""Devices and threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.worker import platform


@pytest.mark.parametrize(("omp", "before", "expected"), [(None, 4, 2), ("3", 4, 4), (None, 1, 1)])
def test_threads_stay_within_the_quota_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omp: str | None, before: int, expected: int
) -> None:
    monkeypatch.setattr(platform, "cpu_quota", lambda root: 2)
    threads = [before]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    platform.set_num_threads(tmp_path)
    assert threads[-1] == expected


@pytest.mark.parametrize(("quota", "num_engines", "expected"), [(None, 2, 4), (6, 2, 3), (None, 3, 2), (2, 4, 1)])
def test_engines_share_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int | None, num_engines: int, expected: int
) -> None:
    monkeypatch.setattr(platform, "cpu_quota", lambda root: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    platform.set_num_threads(tmp_path, num_engines)
    assert threads == [expected]


@pytest.mark.parametrize(
    ("name", "has_cuda", "expected"), [("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu")]
)
def test_the_device_follows_from_flag_and_machine(
    monkeypatch: pytest.MonkeyPatch, name: str, has_cuda: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert platform.choose_device(name).type == expected


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cpu"):
        platform.choose_device("cuda")
