"""How weights reach memory, and which memory."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Where weights come from."""

    load_format: str = flag(
        "auto",
        "auto and safetensors read the checkpoint; dummy fills in random weights.",
        choices=("auto", "safetensors", "dummy"),
    )
    weight_cache: bool = flag(
        True,
        "Keep weights as CPU kernels read them, packed, in the cache directory, for a quicker next start.",
    )
    download_dir: str | None = flag(None, "Cache directory of downloaded models; default is the hub's.")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What computes."""

    device: str = flag("auto", "auto takes CUDA when there is one, else the CPU.", choices=("auto", "cpu", "cuda"))
