"""Tokenizers without a tokenizer.json: converted by transformers, the optional extra `hf`. Its only importer here."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from quire.errors import ConfigError, ModelLoadError
from quire.logger import init_logger

logger = init_logger(__name__)


def load_with_transformers(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], list[str]]:
    """(backend, named special tokens, further ones) of a directory.

    Raises ConfigError if transformers is not installed, ModelLoadError if it cannot make a `tokenizers` backend of what
    is there. Code that comes with a model is never run.
    """
    missing = not (directory / "tokenizer.json").exists()
    try:
        from transformers import AutoTokenizer  # optional, slow to import, and wanted by few repositories
    except ImportError:
        why = f"{directory} has no tokenizer.json" if missing else "--tokenizer-mode hf was given"
        raise ConfigError(
            f"{why}, and transformers, which could convert the tokenizer, is not installed; pip install 'quire[hf]', "
            "or point --tokenizer at a directory with a tokenizer.json"
        ) from None
    if missing:
        logger.info("%s has no tokenizer.json; converting its tokenizer with transformers", directory)
    try:
        hf = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as e:  # it raises whatever its converters raise
        cause = next(iter(str(e).splitlines()), type(e).__name__)
        raise ModelLoadError(f"transformers cannot load a tokenizer from {directory}: {cause}") from e
    backend = getattr(hf, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(
            f"the tokenizer of {directory} ({type(hf).__name__}) exists only as Python code; give a directory with a "
            "tokenizer.json by --tokenizer"
        )
    named = dict(hf.special_tokens_map)
    return backend, named, [str(token) for token in hf.all_special_tokens if str(token) not in named.values()]
