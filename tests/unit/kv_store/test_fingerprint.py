"""Fingerprints: weights count by content."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from pathlib import Path

import pytest

from quire.kv_store import fingerprint
from quire.kv_store.fingerprint import ChangedFileError, FileDigests, HashingStoppedError, make_fingerprint


def now_ns() -> int:
    return time.time_ns() + 1_000_000_000


def test_every_fact_counts_and_their_order_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"config": {"a": 1}, "dtype": "bfloat16", "weights": {"x": "00"}}
    assert make_fingerprint(facts) == make_fingerprint(dict(reversed(facts.items())))
    assert len({make_fingerprint({**facts, name: "other"}) for name in facts} | {make_fingerprint(facts)}) == 4
    before = make_fingerprint(facts)
    monkeypatch.setattr("quire.kv_store.fingerprint.VERSION", 99)
    assert make_fingerprint(facts) != before, "records of another version are not looked for"


def test_a_file_is_hashed_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    expected = {path.name: hashlib.sha256(b"weights").hexdigest()}
    assert FileDigests(tmp_path).digest_files([path], now_ns()) == expected
    assert (tmp_path / "digests.json").stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", None)
        assert FileDigests(tmp_path).digest_files([path], now_ns()) == expected
    status = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its time of change stays
    assert FileDigests(tmp_path).digest_files([path], now_ns()) == {path.name: hashlib.sha256(b"WEIGHTS").hexdigest()}


def test_a_file_changed_since_it_was_loaded_has_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    with pytest.raises(ChangedFileError):
        FileDigests(tmp_path).digest_files([path], path.stat().st_mtime_ns - 1)


def test_the_hubs_blobs_are_named_by_their_content(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / ("ab" * 32)).write_bytes(b"not read")
    (tmp_path / "model.safetensors").symlink_to(blobs / ("ab" * 32))
    digests = FileDigests(tmp_path).digest_files([tmp_path / "model.safetensors"], now_ns())
    assert digests == {"model.safetensors": "ab" * 32}


def test_hashing_can_be_stopped_and_waits_for_no_pipe(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    with pytest.raises(HashingStoppedError):
        FileDigests(tmp_path).digest_files([path], now_ns(), lambda: True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        FileDigests(tmp_path).digest_files([tmp_path / "pipe"], now_ns())


def test_of_several_processes_one_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of an engine need the same digests at the same time."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    first, second = FileDigests(tmp_path), FileDigests(tmp_path)
    hashing = first._alone(lambda: False)
    hashing.__enter__()
    with pytest.raises(HashingStoppedError):
        second.digest_files([path], now_ns(), lambda: True)

    def finish(_: float) -> None:
        hashing.__exit__(None, None, None)
        first.digest_files([path], now_ns())
        monkeypatch.setattr(hashlib, "sha256", None)

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", finish)
        found = second.digest_files([path], now_ns())
    monkeypatch.undo()
    assert found == {path.name: hashlib.sha256(b"weights").hexdigest()}


def test_a_process_that_hangs_keeps_others_waiting_for_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    clock = itertools.count(0.0, fingerprint.MAX_WAIT_S / 2)
    with FileDigests(tmp_path)._alone(lambda: False), monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: None)
        patch.setattr(time, "monotonic", lambda: next(clock))
        found = FileDigests(tmp_path).digest_files([path], now_ns())
    assert found == {path.name: hashlib.sha256(b"weights").hexdigest()}
    assert next(clock) >= fingerprint.MAX_WAIT_S


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_memo_costs_hashing_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    (tmp_path / "digests.json").write_bytes(content)
    digests = FileDigests(tmp_path).digest_files([path], now_ns())
    assert digests == {path.name: hashlib.sha256(b"weights").hexdigest()}
