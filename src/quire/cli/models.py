"""`quire models`: which models run, by which code, and why others do not. docs/models.md is its output.

All of it is read from tables: the registry of models, the certified classes of transformers, the quantization formats
and the parsers.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.config.hf_config import HFConfig
from quire.config.model_impl import certified_models
from quire.config.quantization import STORED_METHODS, WEIGHT_BITS
from quire.config.text_part import REPOSITORIES, TEXT_MODELS
from quire.errors import ConfigError
from quire.frontend.openai.parsers.reasoning import REASONING_PARSERS
from quire.frontend.openai.parsers.tools import TOOL_PARSERS
from quire.worker.models.registry import MODELS

NATIVE, PART, CERTIFIED, REFUSED = "native", "text part", "transformers", "refused"
_REGENERATE = "quire models --markdown > docs/models.md"
Facts = dict[str, Any]


def command_line() -> CommandLine:
    return CommandLine(
        "quire models",
        "List the architectures of config.json that Quire knows: native, by transformers' class, or refused and why.",
        [
            Option(name="json", help="Print one JSON object.", is_switch=True, default=False),
            Option(name="markdown", help="Print the page docs/models.md.", is_switch=True, default=False),
        ],
        Positional("pattern", "Only architectures with this text in their names, in any case."),
        "quire info MODEL says the same of one model, and whether it fits this machine.",
    )


def run(args: Arguments) -> int:
    """Prints the list. Raises ConfigError if no architecture has the given text in its name."""
    facts = make_facts(args["pattern"] or "")
    if not facts["architectures"]:
        raise ConfigError(f"no architecture has {args['pattern']!r} in its name; quire models lists all")
    if args["json"]:
        print(json.dumps(facts, indent=2))
    else:
        print(format_page(facts) if args["markdown"] else format_list(facts), end="")
    return 0


def make_facts(pattern: str = "") -> Facts:
    """Returns what is known of the architectures with `pattern` in their names, and the formats of all models."""
    version, verdicts = certified_models()
    rows: dict[str, Facts] = {
        name: {"path": REFUSED if verdict.refused else CERTIFIED, "why": verdict.refused}
        for name, verdict in verdicts.items()
        if _model(name).family not in MODELS
    }
    for name, target in MODELS.items():
        rows[name] = {"path": NATIVE, "why": "", "class": target, "is_encoder": _model(name).is_encoder}
    for name in REPOSITORIES:
        rows[name] = {"path": PART, "why": "by the type of its text_config"}
    return {
        "transformers": version,
        "architectures": {name: rows[name] for name in sorted(rows) if pattern.casefold() in name.casefold()},
        "text_parts": {kind: name for kind, name in TEXT_MODELS.items() if name in MODELS},
        "quantization": {"at load": list(WEIGHT_BITS), "stored": list(STORED_METHODS)},
        "tool_parsers": sorted(TOOL_PARSERS),
        "reasoning_parsers": sorted(REASONING_PARSERS),
    }


def _model(architecture: str) -> HFConfig:
    """Returns the config of a model of an architecture."""
    return HFConfig({"architectures": [architecture]}, Path("config.json"))


def format_list(facts: Facts) -> str:
    """Formats the architectures, one a line."""
    rows: dict[str, Facts] = facts["architectures"]
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {row['path']:<12}  {row['why']}".rstrip() for name, row in rows.items()]
    counts = ", ".join(f"{len(_named(facts, path))} {path}" for path in (NATIVE, PART, CERTIFIED, REFUSED))
    return "\n".join([*lines, f"{len(rows)} architectures: {counts}"]) + "\n"


def _named(facts: Facts, path: str, **wanted: bool) -> list[str]:
    """Returns the architectures that take a path and have all of the `wanted` flags."""
    rows = facts["architectures"].items()
    return [
        name for name, row in rows if row["path"] == path and all(row.get(k, False) == v for k, v in wanted.items())
    ]


# -- the page ----------------------------------------------------------------------------------------------------------


def format_page(facts: Facts) -> str:
    """Formats docs/models.md."""
    decoders = _named(facts, NATIVE, is_encoder=False)
    certified, refused = _named(facts, CERTIFIED), _named(facts, REFUSED)
    parts = [
        "# Models",
        "    quire models            # this list; quire info MODEL: one model, and whether it fits\n\n"
        f"<!-- Written by `{_REGENERATE}`; a test holds it to the tables. -->",
        "What counts is `architectures` in a checkpoint's config.json, whatever head it names: `GPT2LMHeadModel` is "
        "`GPT2ForCausalLM` below. A model's way of running is chosen by it:",
        _table(
            ("way", "architectures", "what it means"),
            [
                (
                    "native",
                    len(decoders) + len(_named(facts, NATIVE, is_encoder=True)),
                    "Quire's own class: every feature, the same bits in every batch",
                ),
                (
                    "text part",
                    len(_named(facts, PART)),
                    "the text model of a repository that reads images",
                ),
                ("transformers", len(certified), "transformers' modules on Quire's cache: a tolerance, not bits"),
                ("refused", len(refused), "one line says why"),
            ],
        ),
        "## Native decoders",
        _table(
            ("architecture", "class"),
            [(f"`{name}`", _class_and_file(facts["architectures"][name])) for name in decoders],
        ),
        "## Native encoders",
        "For [embeddings and scores](pooling.md). Pooling heads of these and of every decoder "
        "(`…ForSequenceClassification`, `…ForTokenClassification`, …) have no rows of their own.",
        _table(
            ("architecture", "class"),
            [
                (f"`{name}`", _class_and_file(facts["architectures"][name]))
                for name in _named(facts, NATIVE, is_encoder=True)
            ],
        ),
        "## Text parts",
        "The text model of these repositories is served, if the type of its `text_config` is one of the second list. "
        "Requests with images are refused.",
        _names(_named(facts, PART)),
        _names(sorted(facts["text_parts"])),
    ]
    parts += [
        "## Through transformers",
        f"With `pip install 'quire[transformers]'`. Each class was compared with transformers "
        f"{facts['transformers']} on texts computed in pieces, side by side: its logits in float32 are the same to "
        "1e-4. Unlisted classes, and other versions of transformers, are tried when the model is loaded.",
        *([_names(certified)] if certified else []),
        "## Refused",
        _table(("architecture", "why"), [(f"`{n}`", facts["architectures"][n]["why"]) for n in refused]),
    ]
    formats = facts["quantization"]
    parts += [
        "## Weights, tokenizers, formats",
        _table(
            ("what", "names"),
            [
                ("checkpoints", "safetensors in float32, float16, bfloat16; GGUF by `quire convert-gguf`"),
                ("quantized [at load](quantization.md)", _names(formats["at load"])),
                ("quantized in the checkpoint", _names(formats["stored"])),
                ("[tokenizers](tokenizers.md)", "`tokenizer.json`, SentencePiece, tekken, tiktoken"),
                ("[tool calls](tool_calling.md)", _names(facts["tool_parsers"])),
                ("[reasoning](tool_calling.md)", _names(facts["reasoning_parsers"])),
            ],
        ),
        "A new architecture is a file and three rows: [recipe](recipes/add_a_model.md).",
    ]
    return "\n\n".join(part if part.startswith(("|", " ", "#", "<")) else _wrapped(part) for part in parts) + "\n"


def _class_and_file(row: Facts) -> str:
    """Returns the class of a row, and its file."""
    module, name = row["class"].split(":")
    path = f"src/{module.replace('.', '/')}.py"
    return f"`{name}`, {path}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrapped(text: str) -> str:
    """Returns a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
