"""The files of a tokenizer: `tokenizer.json`, or a vocabulary that is converted to one, and what stands beside it.

`read_tokenizer_dir` gives the `tokenizers` backend, the special tokens and the chat templates of a directory. The rules
(which file wins, which tokens are added to the backend, in which order) are those of transformers 5, so that ids come
out the same: `tests/unit/frontend/text/test_tokenizer.py` compares the two. In particular the post-processor of
`tokenizer.json` decides whether a BOS or EOS is added; `add_bos_token` in `tokenizer_config.json` is of the time before
that file existed and is not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.config.checkpoint import MAX_TEMPLATE_BYTES, read_object, read_text
from quire.config.tokenizer_json import TokenizerText, read_tokenizer_json
from quire.errors import ConfigError, ModelLoadError
from quire.frontend.text.tokenizer_growth import validate_growth
from quire.logger import init_logger

logger = init_logger(__name__)

MAX_TEMPLATES = 64
NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a tokenizer directory."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Named special tokens: bos_token, eos_token, ... and the model's own (image_token, ...)."""
    extra_special_tokens: list[str] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name; a repository with one template has `default`."""


def read_tokenizer_dir(directory: Path, mode: str = "auto") -> TokenizerFiles:
    """Reads a tokenizer. `mode` "auto" reads tokenizer.json or converts a vocabulary file; "hf" (or a directory with
    neither) uses transformers.

    Truncation and padding that a tokenizer.json may carry are for training, and switched off. Raises ModelLoadError
    naming the file (for one that multiplies texts, too), or ConfigError when transformers is needed and absent.
    """
    config = read_object(directory, "tokenizer_config.json") or {}
    found = read_tokenizer_json(directory, config) if mode != "hf" else None
    if found is not None:
        validate_growth(found.path, found.text)
    try:
        return _read_files(directory, config, found)
    except BaseException as e:
        if is_panic(e):
            raise ModelLoadError(f"{found.path if found else directory} cannot be used as a tokenizer: {e}") from None
        raise


def is_panic(error: BaseException) -> bool:
    """True for an error of the tokenizers library that is no Exception: an assertion of its Rust code has failed, for
    example because a regular expression of the tokenizer takes too many steps on a text."""
    return type(error).__name__ == "PanicException"


def _read_files(directory: Path, config: dict[str, Any], found: TokenizerText | None) -> TokenizerFiles:
    if found is None:
        backend, names, others = load_with_transformers(directory)
        templates = _chat_templates(directory, config)
    else:
        backend = _read_backend(found)
        try:
            named, extra, decoder = _special_tokens(directory, found.special_tokens | config, backend)
            _add_missing_tokens(backend, named, extra, decoder)
            names, others = {name: _content(token) for name, token in named.items()}, [_content(t) for t in extra]
            templates = _chat_templates(directory, config)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as e:
            if isinstance(e, ModelLoadError):
                raise
            raise ModelLoadError(
                f"the tokenizer configuration in {directory} cannot be read ({type(e).__name__}: {e}); its special "
                "tokens or chat templates are not of the usual form"
            ) from e
    backend.no_truncation()
    backend.no_padding()
    return TokenizerFiles(backend, names, others, templates)


def _read_backend(found: TokenizerText) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(found.text)
    except Exception as e:  # the Rust side raises plain Exception
        raise ModelLoadError(
            f"{found.path} cannot be read as a tokenizer: {e}; download it again, or point --tokenizer at another"
        ) from None


def _special_tokens(
    directory: Path, config: dict[str, Any], backend: tokenizers.Tokenizer
) -> tuple[dict[str, str | AddedToken], list[str | AddedToken], dict[int, AddedToken]]:
    """Returns (named special tokens, further special tokens, tokens to add by id).

    `added_tokens_decoder` in tokenizer_config.json supersedes the older special_tokens_map.json, added_tokens.json and
    the list inside tokenizer.json.
    """
    settings = _without_additional(config)
    if "added_tokens_decoder" in config:
        decoder = {int(token_id): _added_token(value) for token_id, value in config["added_tokens_decoder"].items()}
    else:
        for name, value in _without_additional(read_object(directory, "special_tokens_map.json") or {}).items():
            settings[name] = {**value, "special": True} if isinstance(value, dict) and "content" in value else value
        special = {_content(v) for k, v in settings.items() if k in NAMED_SPECIAL_TOKENS and v}
        special |= {_content(v) for v in _values(settings.get("extra_special_tokens"))}
        decoder = {
            int(token_id): AddedToken(content, normalized=content not in special, special=content in special)
            for content, token_id in (read_object(directory, "added_tokens.json") or {}).items()
        }
        decoder.update(backend.get_added_tokens_decoder())
    known = {token.content: token for token in decoder.values()}
    named = {name: settings[name] for name in NAMED_SPECIAL_TOKENS if settings.get(name) is not None}
    tokens = {name: known.get(_content(value), _token(value)) for name, value in named.items()}
    own = {k: v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str)}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        own, extra = {**own, **extra}, None
    tokens.update({name: _token(value) for name, value in own.items() if name not in NAMED_SPECIAL_TOKENS})
    return tokens, [_token(value) for value in _values(extra)], decoder


def _without_additional(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy in which `additional_special_tokens` goes by its newer name, `extra_special_tokens`."""
    settings = dict(settings)
    additional = settings.pop("additional_special_tokens", None)
    if additional and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = additional
    return settings


def _values(tokens: Any) -> list[Any]:
    """Returns the tokens of a list or of a map from name to token."""
    return list(tokens.values() if isinstance(tokens, dict) else tokens or ())


def _token(value: Any) -> str | AddedToken:
    """Returns a token as configuration files write it: a string, or an object with `content` and its flags."""
    return _added_token(value) if isinstance(value, dict) else str(value)


def _added_token(value: dict[str, Any]) -> AddedToken:
    flags = {k: bool(v) for k, v in value.items() if k in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(value["content"], **flags)


def _content(value: Any) -> str:
    if isinstance(value, dict):
        return str(value["content"])
    return value.content if isinstance(value, AddedToken) else str(value)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer,
    named: dict[str, str | AddedToken],
    extra: list[str | AddedToken],
    decoder: dict[int, AddedToken],
) -> None:
    """Adds the tokens that the configuration names and tokenizer.json does not: first by id, then by name, then the
    rest."""
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted: list[str | AddedToken] = [decoder[i] for i in sorted(decoder) if repr(decoder[i]) not in present]
    contents |= {_content(token) for token in wanted}
    for token in (*named.values(), *extra):
        if _content(token) not in contents:
            contents.add(_content(token))
            wanted.append(token)
    names = {_content(token) for token in named.values()}
    for position, token in enumerate(wanted):
        if isinstance(token, str):
            wanted[position] = AddedToken(token, special=True)
        elif token.content in names:
            token.special = True
    backend.add_tokens(wanted)


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name. Template files win over tokenizer_config.json, where one template is text and
    several are a list, and that over chat_template.json, where models that also read images have it."""
    files = {path.stem: f"additional_chat_templates/{path.name}" for path in _additional_templates(directory)}
    files["default"] = "chat_template.jinja"
    texts = {name: read_text(directory, file, MAX_TEMPLATE_BYTES) for name, file in files.items()}
    templates = {name: text for name, text in texts.items() if text is not None}
    if templates:
        return templates
    value = config.get("chat_template") or (read_object(directory, "chat_template.json") or {}).get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(k): str(v) for k, v in value.items()}
    return {str(item["name"]): str(item["template"]) for item in value or ()}


def _additional_templates(directory: Path) -> list[Path]:
    found = sorted(islice(directory.glob("additional_chat_templates/*.jinja"), MAX_TEMPLATES + 1))
    if len(found) > MAX_TEMPLATES:
        raise ModelLoadError(f"{directory} holds more than {MAX_TEMPLATES} additional chat templates")
    return found


_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "tiktoken.model", "qwen.tiktoken",
)  # fmt: skip
"""Files that hold a tokenizer's vocabulary."""


def load_with_transformers(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], list[str]]:
    """Returns (backend, named special tokens, further ones) of a directory.

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
        if not any((directory / name).exists() for name in _VOCABULARIES):
            cause = "it holds no tokenizer"
        else:
            cause = " ".join(str(e).split())[:300] or type(e).__name__
        raise ModelLoadError(
            f"transformers cannot load a tokenizer from {directory}: {cause}; point --tokenizer at a directory with a "
            "tokenizer.json, or work with token ids (--skip-tokenizer-init)"
        ) from e
    backend = getattr(hf, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(
            f"the tokenizer of {directory} ({type(hf).__name__}) exists only as Python code; give a directory with a "
            "tokenizer.json by --tokenizer"
        )
    named = dict(hf.special_tokens_map)
    return backend, named, [str(token) for token in hf.all_special_tokens if str(token) not in named.values()]
