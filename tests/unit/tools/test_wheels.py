"""scripts/wheels: a wheel has the kernels, the instruction sets of a checkout's build, and a name that is true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quire.worker.kernels.library import LIBRARY, NativeLibrary

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "wheels"
MISSING = 77
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", ELF_MACHINES)
def test_a_wheel_is_what_its_name_says(machine: str, tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT), machine], capture_output=True, text=True)
    if done.returncode == MISSING:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (ROOT / "dist").glob(f"quire-*-py3-none-manylinux_*_{machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract("quire/worker/kernels/libquire_kernels.so", tmp_path))
        names = archive.namelist()
    assert not [name for name in names if "libs/" in name], "auditwheel had to put libraries beside ours"
    head = library.read_bytes()[:20]
    assert int.from_bytes(head[18:20], "little") == ELF_MACHINES[machine]
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+)", library.read_bytes())}
    named = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    assert named is not None
    assert max(versions) <= (int(named[1]), int(named[2]))
    if machine == "x86_64" and LIBRARY.exists():
        here = [name for name in NativeLibrary(LIBRARY).instruction_sets() if name != "amx_simulated"]
        assert NativeLibrary(library).instruction_sets() == here


def test_a_missing_cross_compiler_is_named(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    tools = tmp_path / "build" / "wheels" / "tools" / "bin"
    scripts.mkdir()
    tools.mkdir(parents=True)
    shutil.copy(SCRIPT, scripts)
    (tools / "auditwheel").symlink_to("/bin/true")
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "CXX_s390x": "no-such-compiler"}
    done = subprocess.run([str(scripts / "wheels"), "s390x"], capture_output=True, text=True, env=environment)
    assert done.returncode == MISSING
    assert "there is no no-such-compiler here (Debian: g++-s390x-linux-gnu)" in done.stdout
