"""Where a model comes from: the package, a directory, or the hub."""

from __future__ import annotations

import re
from pathlib import Path

from quire.config.model import ASSETS_DIR, DEMO_MODEL, DRAFT_MODEL
from quire.errors import ConfigError, ModelLoadError

_HUB_ID = re.compile(r"^[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)?$")
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]


def resolve_model_dir(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    token: str | None = None,
    tokenizer_only: bool = False,
) -> Path:
    """The directory of `model`: a shipped name, a local directory, or a hub id (downloaded unless cached).

    Raises ModelLoadError when it is none of these or cannot be fetched; the message names both remedies.
    """
    if model in (DEMO_MODEL, DRAFT_MODEL) and not Path(model).is_dir():
        return ASSETS_DIR / model
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        raise ModelLoadError(
            f"{model} is a GGUF file; turn it into a checkpoint directory first: quire convert-gguf {model} DIRECTORY"
        )
    if path.is_file():
        raise ModelLoadError(f"{model} is a file; give the directory that holds config.json and the weights")
    if not _HUB_ID.match(model) or model.startswith((".", "~")):
        raise ModelLoadError(f"{model} is not a directory, and not a hub id either (those look like owner/name)")
    return _download(model, revision, download_dir, token, _TOKENIZER_FILES if tokenizer_only else _MODEL_FILES)


def _download(
    model: str, revision: str | None, download_dir: str | None, token: str | None, patterns: list[str]
) -> Path:
    import huggingface_hub  # a third-party import of 0.2 s that local models do not need

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, cache_dir=download_dir, token=token, allow_patterns=patterns
            )
        )
    except (OSError, ValueError) as e:  # the hub's own errors derive from these
        cause = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ModelLoadError(
            f"{model} is not a local directory and could not be fetched from the hub ({cause}); give the path of a "
            f"downloaded checkpoint, or fetch it where there is a network with: hf download {model}"
        ) from e
    except Exception as e:  # httpx errors do not share a base with OSError
        if isinstance(e, ConfigError):
            raise
        raise ModelLoadError(
            f"{model} is not a local directory and the hub cannot be reached ({type(e).__name__}); give the path of a "
            f"downloaded checkpoint, or fetch it where there is a network with: hf download {model}"
        ) from e
