"""The configuration of LoRA adapters, and adapters as an operator names them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire import envs
from quire.config.flags import flag, parse_human_int
from quire.config.hub import TOKENIZER_FILES, fetch_model, is_hub_id
from quire.errors import ConfigError, NotFoundError
from quire.logger import init_logger

logger = init_logger(__name__)

ADAPTER_FILES = [*TOKENIZER_FILES, "adapter_model.safetensors"]
"""Patterns of the files of a repository that are downloaded with an adapter."""
OWN_TEMPLATE = "adapter"
"""Value of `AdapterSpec.chat_template` for the template in the adapter's directory."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The switch of adapters, and their bounds."""

    enable_lora: bool = flag(False, "Serve LoRA adapters: a request may name one.")
    max_loras: int | None = flag(
        None,
        "Different adapters among the requests that run at once; the others wait. Default: no limit.",
        parse=int,
        minimum=1,
    )
    max_lora_rank: int | None = flag(
        None,
        "Largest rank of an adapter; larger ones are refused. A bound only: it costs nothing. Default: 512.",
        parse=int,
        minimum=1,
        maximum=512,
    )
    max_cpu_loras: int | None = flag(
        None,
        "Adapters kept in memory; the least recently used goes first. Default: as many as --lora-memory-bytes holds.",
        parse=int,
        minimum=1,
    )
    lora_dtype: str = flag(
        "auto", "Type of adapters' weights; auto follows the model.", choices=("auto", "bfloat16", "float32")
    )
    lora_target_modules: tuple[str, ...] = flag(
        (),
        "Modules that an adapter may change (suffixes or full names); adapters with others are refused. Default: all.",
        takes_many=True,
    )
    max_lora_cls_labels: int | None = flag(
        None,
        "Most labels of a classifier that an adapter brings. Default: as many as the model's own has.",
        parse=int,
        minimum=1,
        maximum=1 << 16,
    )
    lora_memory_bytes: int | None = flag(
        None,
        "Memory of loaded adapters (1G, 512M). Default: 1 GiB, at most a tenth of the free memory; 64M at least.",
        parse=parse_human_int,
        minimum=0,
    )
    lora_dir: tuple[str, ...] = flag(
        (),
        "A directory of adapters: those below it are served by relative path, loaded at first use. Implies "
        "--enable-lora.",
        takes_many=True,
        metavar="DIR",
    )

    def settle(self) -> LoRAConfig:
        """Returns the configuration with absolute directories, and enabled if it names one. Raises ConfigError for
        values that exclude each other."""
        more = envs.LORA_RESOLVER_CACHE_DIR.get()
        given = self.lora_dir + ((more,) if more and (self.enable_lora or self.lora_dir) else ())
        directories = tuple(dict.fromkeys(os.path.realpath(Path(text).expanduser()) for text in given))
        for directory in directories:
            if not os.path.isdir(directory):
                raise ConfigError(f"--lora-dir {directory} is not a directory; make it, or name another one")
        if self.max_cpu_loras is not None and self.max_cpu_loras < (self.max_loras or 1):
            raise ConfigError(
                f"--max-cpu-loras {self.max_cpu_loras} is below --max-loras {self.max_loras}: adapters that run are in "
                "memory; raise the first or lower the second"
            )
        settled = dataclasses.replace(
            self,
            enable_lora=self.enable_lora or bool(directories),
            lora_dir=directories,
        )
        if not settled.enable_lora and settled != LoRAConfig():
            logger.warning("flags of LoRA adapters have no effect without --enable-lora")
        return settled


class AdapterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An adapter to be served: an item of --lora-modules in JSON."""

    name: str
    path: str
    """Directory, or a hub id."""
    base_model_name: str | None = None
    """Name of the model that it adapts, as /v1/models shows it; None: the first name of the model."""
    chat_template: str | None = None
    """"adapter": the one in the adapter's directory. Another value: a file. None: the model's."""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def parse_lora_module(text: str) -> AdapterSpec:
    """Returns the adapter that an item of --lora-modules names: name=path, or a JSON object. Raises ConfigError."""
    name, equals, path = text.partition("=")
    if equals and not text.lstrip().startswith("{"):
        spec = AdapterSpec(name.strip(), path.strip())
    else:
        try:
            spec = msgspec.json.decode(text, type=AdapterSpec)
        except msgspec.MsgspecError as e:
            raise ConfigError(
                f"--lora-modules {text[:200]!r} is neither NAME=PATH nor a JSON object with name and path: {e}"
            ) from None
    if not spec.name or not spec.path:
        raise ConfigError(f"--lora-modules {text[:200]!r} needs a name and a path: NAME=PATH")
    return spec


def resolve_adapter_dir(path: str, download_dir: str | None = None) -> Path:
    """Returns the directory of an adapter: a local one, or that of a hub id, downloaded unless it is in the cache.

    Raises NotFoundError if there is nothing, ConfigError if it cannot be downloaded.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return Path(os.path.abspath(local))
    if local.exists():
        raise NotFoundError(
            f"{path} is a file; give the directory that holds adapter_config.json and the weights", param="lora_path"
        )
    if "/" not in path or not is_hub_id(path):  # the hub's adapters have owners
        raise NotFoundError(f"there is no adapter at {path}: no such directory", param="lora_path", value=path)
    return fetch_model(path, None, download_dir, None, ADAPTER_FILES)
