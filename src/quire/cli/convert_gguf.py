"""`quire convert-gguf`: turns a GGUF file, llama.cpp's format, into a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from quire.cli.command_line import Arguments, CommandLine, Positional
from quire.errors import ConfigError
from quire.resolve import resolve


def command_line() -> CommandLine:
    return CommandLine(
        "quire convert-gguf",
        "Write the model of a GGUF file as a checkpoint directory: config.json, safetensors, tokenizer.json.",
        [],
        Positional("paths", "FILE.gguf DIRECTORY", nargs="*"),
        "Weights become bfloat16 (float32 where the file has float32 matrices); --quantization int8 or int4 makes them "
        "small. Needs the gguf extra: pip install 'quire[gguf]'.",
    )


def run(args: Arguments) -> int:
    paths = args["paths"]
    if len(paths) != 2:
        raise ConfigError(f"quire convert-gguf takes FILE.gguf and DIRECTORY; got {len(paths)} words")
    source, target = map(Path, paths)
    notes = resolve("quire.cli.gguf_checkpoint:convert")(source, target)  # loads numpy, which help does not need
    print("\n".join([f"{target} holds the model of {source}", *notes]))
    return 0
