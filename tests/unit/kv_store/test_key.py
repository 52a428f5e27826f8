"""The key of a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.kv_store.directory import load_key


def test_a_key_is_made_once(tmp_path: Path) -> None:
    key = load_key(tmp_path)
    assert len(key) == 32
    assert load_key(tmp_path) == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_one_key_for_several_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounted").write_bytes(bytes(range(32)))
    (tmp_path / "mounted").chmod(0o440)
    (tmp_path / "secret").symlink_to("mounted")  # as Kubernetes mounts one
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "secret"))
    assert load_key(tmp_path / "store") == bytes(range(32))
    monkeypatch.setenv("QUIRE_KV_STORE_KEY_FILE", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_key(tmp_path)


def test_what_is_no_private_file_of_32_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for make, message in (
        (lambda: path.write_bytes(b"short"), "has 5 bytes and must have 32"),
        (lambda: (path.write_bytes(bytes(32)), path.chmod(0o644)), "can be read by others"),
        (lambda: os.mkfifo(path, 0o600), "is not a file of this user"),
        (lambda: path.mkdir(0o700), "is not a file of this user"),
        (lambda: path.symlink_to("/etc/passwd"), "cannot be read"),
    ):
        make()
        if path.is_file() and not path.is_symlink() and "others" not in message:
            path.chmod(0o600)
        with pytest.raises(ConfigError, match=message):
            load_key(tmp_path)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    with pytest.raises(
        ConfigError, match="cannot be read: No such file or directory; a server with --kv-store makes one"
    ):
        load_key(tmp_path, is_made=False)
