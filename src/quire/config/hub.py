"""The hub's cache: room for a download, the models that are there, and their deletion.

`config/model.py` finds and downloads the model of an engine; this file is for the commands pull, list and rm.
huggingface_hub is imported where it is used: that takes 0.2 s.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.config.model import MODEL_FILES, SECOND_COPIES
from quire.errors import ConfigError

SPARE_BYTES = 64 << 20
"""Free space that a download must leave."""
_GIB = 1 << 30


@dataclass(frozen=True)
class CachedModel:
    """A model in the hub's cache, all of its revisions."""

    name: str
    num_bytes: int
    used_time: float
    path: Path


def cache_dir(directory: str | None) -> Path:
    """Returns the directory of the hub's cache."""
    from huggingface_hub import constants

    return Path(directory or constants.HF_HUB_CACHE)


def cached_models(directory: str | None) -> list[CachedModel]:
    """Returns the models in the cache, the one used last first."""
    import huggingface_hub

    cache = cache_dir(directory)
    repos = huggingface_hub.scan_cache_dir(cache).repos if cache.is_dir() else ()
    found = [
        CachedModel(r.repo_id, r.size_on_disk, r.last_accessed, r.repo_path) for r in repos if r.repo_type == "model"
    ]
    return sorted(found, key=lambda model: -model.used_time)


def delete_model(name: str, directory: str | None) -> int:
    """Deletes a model from the cache. Returns the bytes that are free again. Raises ConfigError if it is not there."""
    import huggingface_hub

    cache = cache_dir(directory)
    info = huggingface_hub.scan_cache_dir(cache) if cache.is_dir() else None
    repos = [repo for repo in (info.repos if info else ()) if repo.repo_type == "model" and repo.repo_id == name]
    if info is None or not repos:
        raise ConfigError(f"{name!r} is not in {cache}; quire list shows what is")
    strategy = info.delete_revisions(*(revision.commit_hash for revision in repos[0].revisions))
    strategy.execute()
    return int(strategy.expected_freed_size)


def check_room(model: str, revision: str | None, token: str | None, directory: str | None) -> None:
    """Raises ConfigError for a repository without safetensors, or one that does not fit on the disk.

    A hub that does not answer is left to the download, which may find the model in the cache.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        info = huggingface_hub.HfApi(token=token).model_info(model, revision=revision, files_metadata=True)
    except Exception:  # network errors have no common base; the download names the cause
        return
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = [name for name in sizes if _matches(name, MODEL_FILES) and not _matches(name, SECOND_COPIES)]
    if not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(f"{model} holds no safetensors weights, and Quire reads no others; choose another repository")
    cache = cache_dir(directory)
    held = {
        name: huggingface_hub.try_to_load_from_cache(model, name, cache_dir=cache, revision=info.sha) for name in names
    }
    needed = sum(sizes[name] for name in names if not isinstance(held[name], str))
    place = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed + SPARE_BYTES > free:
        raise ConfigError(
            f"{model} needs {needed / _GIB:.1f} GiB more, and {place} has {free / _GIB:.1f} GiB free; make room "
            "(quire list, quire rm), or choose another disk with --download-dir"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
