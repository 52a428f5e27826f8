"""The text of a model's tokenizer.json: the file itself, or one made of another vocabulary file.

Repositories without a tokenizer.json hold their vocabulary as SentencePiece's `tokenizer.model`, as Mistral's
`tekken.json`, or in tiktoken's format. What stands in these files is data, so the conversion needs neither their
libraries nor transformers, and the frontend and the grammar compiler read the same result.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.byte_pair_files import convert_tekken, convert_tiktoken, is_tiktoken
from quire.config.checkpoint import MAX_TOKENIZER_BYTES, find_file, read_bytes, read_object, read_text
from quire.config.sentencepiece_file import convert_sentencepiece
from quire.errors import ModelLoadError

MAX_VOCABULARY_BYTES = 64 << 20
"""Maximum size of a vocabulary file that is converted. The largest known has 20 MB."""
_TIKTOKEN_FILES = ("qwen.tiktoken", "hy.tiktoken", "tiktoken.model")
_SENTENCEPIECE = re.compile(r"tokenizer\.model(\.v\d+\w*)?")


class TokenizerText(NamedTuple):
    """A tokenizer.json and where it comes from."""

    path: Path
    text: str
    special_tokens: dict[str, str]
    """Named special tokens of a converted vocabulary: bos_token, eos_token, ...; empty for a tokenizer.json."""


def read_tokenizer_json(directory: Path, config: dict[str, Any] | None = None) -> TokenizerText | None:
    """Returns the tokenizer.json of a directory, or the one its vocabulary file makes; None if it has neither.

    `config` is tokenizer_config.json, read if None. Raises ModelLoadError naming the file, UnsupportedModelError for a
    vocabulary whose rules are not known.
    """
    text = read_text(directory, "tokenizer.json", MAX_TOKENIZER_BYTES)
    if text is not None:
        return TokenizerText(directory / "tokenizer.json", text, {})
    path = find_vocabulary(directory)
    if path is None:
        return None
    config = (read_object(directory, "tokenizer_config.json") or {}) if config is None else config
    data = read_bytes(directory, path.name, MAX_VOCABULARY_BYTES)
    try:
        if path.name == "tekken.json":
            content, names = convert_tekken(path, data)
        elif path.name in _TIKTOKEN_FILES or is_tiktoken(data):
            content, names = convert_tiktoken(path, data, config)
        else:
            content, names = convert_sentencepiece(path, data, config)
    except ModelLoadError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
        raise ModelLoadError(f"{path} cannot be read as a vocabulary: {' '.join(str(e).split())[:300]}") from None
    return TokenizerText(path, json.dumps(content, ensure_ascii=False), names)


def find_vocabulary(directory: Path) -> Path | None:
    """Returns the vocabulary file of a directory that has no tokenizer.json; None if it has none either."""
    found = sorted(directory.glob("tokenizer.model*"))
    models = [path.name for path in found if _SENTENCEPIECE.fullmatch(path.name)]
    models = models[:1] if models[:1] == ["tokenizer.model"] else models[-1:]
    for name in ("tekken.json", *_TIKTOKEN_FILES, *models):
        path = find_file(directory, name, MAX_VOCABULARY_BYTES)
        if path is not None:
            return path
    return None
