"""The hub: what a download takes, the download, what is in its cache, and what is known of a model before.

huggingface_hub is imported where it is used: that takes 0.2 s.
"""

from __future__ import annotations

import difflib
import errno
import fnmatch
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quire import envs, interrupts
from quire.config.checkpoint import CheckpointIndex, write_outline
from quire.errors import ConfigError, ModelLoadError
from quire.logger import init_logger

logger = init_logger("quire.hub")
if not envs.LOGGING_LEVEL.is_set:
    logger.setLevel(logging.INFO)  # gigabytes are never fetched without a word, whatever the command

SPARE_BYTES = 64 << 20
"""Free space that a download must leave."""
_MIB, _GIB = 1 << 20, 1 << 30
_HUB_ID = re.compile(r"^[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)?$")
TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
"""Patterns of the files of a repository that are downloaded."""
SECOND_COPIES = ["consolidated*", "original/*", "metal/*", "onnx/*"]
"""Files in which some repositories hold the weights once more, in a form for other programs."""


@dataclass(frozen=True)
class SuggestedModel:
    """A small model to begin with. Its counts follow from its config.json; a test computes them."""

    name: str
    parameters: int
    cache_bytes_per_token: int
    note: str = ""

    @property
    def memory_bytes(self) -> int:
        """Memory of the weights in bfloat16, and of the cache for 4096 tokens."""
        return 2 * self.parameters + 4096 * self.cache_bytes_per_token


SUGGESTED = (
    SuggestedModel("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008, 23_040),
    SuggestedModel("Qwen/Qwen3-0.6B", 596_049_920, 114_688, "has a reasoning mode"),
    SuggestedModel("google/gemma-3-1b-it", 999_885_952, 26_624, "gated: accept its terms on the hub"),
    SuggestedModel("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, 32_768, "gated: accept its terms on the hub"),
    SuggestedModel("HuggingFaceTB/SmolLM3-3B", 3_075_098_624, 73_728, "has a reasoning mode"),
    SuggestedModel("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096, 147_456),
)


def format_suggestions() -> str:
    """Formats the suggested models as a table."""
    rows = (f"  {m.name:<37}{m.parameters / 1e9:>5.1f} B{m.memory_bytes / _GIB:>6.1f} GiB  {m.note}" for m in SUGGESTED)
    return "\n".join(row.rstrip() for row in rows)


def is_hub_id(name: str) -> bool:
    """Returns whether a name has the form of a hub id."""
    return _HUB_ID.match(name) is not None and not name.startswith((".", "~"))


# -- the download ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Download:
    """Files of a repository that are wanted, and which of them the cache lacks."""

    model: str
    commit: str
    sizes: dict[str, int]
    missing: tuple[str, ...]
    cache: Path
    free_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be fetched."""
        return sum(self.sizes[name] for name in self.missing)

    @property
    def text(self) -> str:
        """Sentence about what is fetched, and where to."""
        return (
            f"fetching {self.model}: {_size(self.missing_bytes)} in {len(self.missing)} of {len(self.sizes)} files, to "
            f"{self.cache} ({_size(self.free_bytes)} free); Ctrl-C stops it, and files that are whole are kept"
        )

    def check_weights(self) -> None:
        """Raises ConfigError for a repository without safetensors."""
        if not any(name.endswith(".safetensors") for name in self.sizes):
            raise ConfigError(
                f"{self.model} holds no safetensors weights, and Quire reads no others; choose another repository"
            )

    def obstacles(self) -> list[str]:
        """Returns why the download does not fit on the disk; nothing if it does."""
        if self.missing_bytes + SPARE_BYTES <= self.free_bytes:
            return []
        return [
            f"{self.model} needs {_size(self.missing_bytes)} more, and {self.cache} has {_size(self.free_bytes)} free; "
            "make room (quire list, quire rm), or choose another disk with --download-dir"
        ]


def plan_download(
    model: str, revision: str | None, token: str | None, directory: str | None, patterns: Sequence[str] = MODEL_FILES
) -> Download | None:
    """Returns what a download would fetch. None: the hub does not answer; the download, which may find the model in
    the cache, names the cause."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        info = huggingface_hub.HfApi(token=token).model_info(model, revision=revision, files_metadata=True)
    except Exception:  # network errors have no common base
        return None
    sizes = {
        file.rfilename: file.size or 0
        for file in info.siblings or ()
        if _matches(file.rfilename, patterns) and not _matches(file.rfilename, SECOND_COPIES)
    }
    cache = cache_dir(directory)
    held = {name: huggingface_hub.try_to_load_from_cache(model, name, cache, info.sha) for name in sizes}
    missing = tuple(name for name in sizes if not isinstance(held[name], str))
    place = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    return Download(model, info.sha or "", sizes, missing, cache, shutil.disk_usage(place).free)


def fetch_model(
    model: str, revision: str | None, directory: str | None, token: str | None, patterns: Sequence[str] = MODEL_FILES
) -> Path:
    """Returns the directory of a model of the hub, downloaded unless it is in the cache. Raises ConfigError for one
    that does not fit, and ModelLoadError for one that cannot be fetched."""
    import huggingface_hub

    plan = plan_download(model, revision, token, directory, patterns)
    if plan is not None and patterns is MODEL_FILES:
        plan.check_weights()
    if plan is not None and plan.missing:
        for obstacle in plan.obstacles():
            raise ConfigError(obstacle)
        logger.info("%s", plan.text)
    with interrupts.ending_process(_delete_parts), _worded_errors(model, revision, token, directory):
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=directory,
                token=token,
                allow_patterns=list(patterns),
                ignore_patterns=SECOND_COPIES,
            )
        )


def make_outline(plan: Download, token: str | None, directory: Path) -> Path:
    """Makes a checkpoint of a model that was not downloaded: its small files, and weights whose headers are real and
    whose tensors are holes. Returns its folder, inside `directory`. Raises ModelLoadError."""
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token)
    with _worded_errors(plan.model, plan.commit, token, None):
        folder = Path(
            huggingface_hub.snapshot_download(
                plan.model,
                revision=plan.commit,
                cache_dir=directory,
                token=token,
                allow_patterns=TOKENIZER_FILES,
                ignore_patterns=SECOND_COPIES,
            )
        )
        for name in plan.sizes:
            if name.endswith(".safetensors"):
                found = api.parse_safetensors_file_metadata(plan.model, name, revision=plan.commit)
                tensors = {
                    key: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets}
                    for key, t in found.tensors.items()
                }
                write_outline(folder, name, tensors)
    return folder


def _delete_parts() -> None:
    """Deletes the files that this process is downloading: huggingface_hub never goes on with a part, nor deletes it."""
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # it has just been closed
            path = link.readlink()
            if path.suffix == ".incomplete":
                path.unlink()


@contextmanager
def _worded_errors(model: str, revision: str | None, token: str | None, directory: str | None) -> Iterator[None]:
    """Turns the hub's errors into a ModelLoadError with a remedy."""
    from huggingface_hub import constants, errors, get_token

    try:
        yield
    except errors.GatedRepoError as e:
        has_token = bool(token or get_token())
        remedy = "the account of this token has no access yet" if has_token else "then give a token: HF_TOKEN=hf_..."
        raise ModelLoadError(
            f"{model} is gated: accept its terms at {constants.ENDPOINT}/{model} and wait to be let in; {remedy}"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise ModelLoadError(
            f"the hub has no model {model}, or shows it only to those with a token (HF_TOKEN=hf_...); "
            f"{_nearest(model, token)}"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise ModelLoadError(f"{model} has no revision {revision!r}; {constants.ENDPOINT}/{model} lists them") from e
    except (OSError, ValueError) as e:  # the hub's own errors derive from these
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(
                f"the disk of {cache_dir(directory)} is full; make room (quire list, quire rm), or choose another with "
                "--download-dir; what is there already is not fetched again"
            ) from e
        cause = str(e).splitlines()[0] if str(e) else type(e).__name__
        if constants.HF_HUB_OFFLINE:
            cause = "HF_HUB_OFFLINE is set, and the hub's cache does not hold it"
        raise ModelLoadError(
            f"{model} is not a local directory and could not be fetched from the hub ({cause}); {_fetch_advice(model)}"
        ) from e
    except Exception as e:  # httpx errors do not share a base with OSError
        if isinstance(e, ConfigError):
            raise
        raise ModelLoadError(
            f"{model} is not a local directory and the hub cannot be reached ({type(e).__name__}); "
            f"{_fetch_advice(model)}"
        ) from e


def _nearest(model: str, token: str | None) -> str:
    """Returns a question with the name that was probably meant, or advice."""
    import huggingface_hub
    from huggingface_hub import constants

    word = model.rsplit("/", 1)[-1]
    names = [suggested.name for suggested in SUGGESTED]
    try:
        names += [found.id for found in huggingface_hub.HfApi(token=token).list_models(search=word, limit=20)]
    except Exception:  # the search is a courtesy, and network errors have no common base
        logger.debug("the hub's search for %s failed", word, exc_info=True)
    by_word = {name.rsplit("/", 1)[-1].lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(word.lower(), by_word, n=1)
    if near or "/" not in model:
        return f"did you mean {by_word[near[0]]}?" if near else _fetch_advice(model)
    return f"{constants.ENDPOINT}/models has a search; or give the path of a downloaded checkpoint"


def _fetch_advice(model: str) -> str:
    if "/" not in model:
        return f"give the path of a downloaded checkpoint, or a hub id with its owner, as in OWNER/{model}"
    return f"give the path of a downloaded checkpoint, or fetch it where there is a network with: quire pull {model}"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


# -- the cache ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedModel:
    """A model in the hub's cache, all of its revisions."""

    name: str
    num_bytes: int
    used_time: float
    path: Path

    @property
    def has_weights(self) -> bool:
        """False where the weights of every revision lack a file, as after a download that was stopped."""
        for snapshot in self.path.glob("snapshots/*"):
            with suppress(ModelLoadError):
                return bool(CheckpointIndex.from_dir(snapshot).tensors)
        return False


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
