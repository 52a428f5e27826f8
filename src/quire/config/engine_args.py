"""Makes an `EngineConfig` from keyword arguments, or from a command line's flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from quire import envs
from quire.config.checkpoint import read_object
from quire.config.engine import FP8_CACHE_DTYPES, EngineConfig, SchedulerConfig
from quire.config.flags import FlagSpec, flags_of
from quire.config.hf_config import HFConfig
from quire.config.kv_transfer import STORE
from quire.config.model import ModelConfig, resolve_model_dir
from quire.config.model_impl import TRANSFORMERS, ModelImpl, choose_model_impl
from quire.config.pooling_files import resolve_pooling
from quire.config.speculative import SpeculativeConfig, resolve_drafting
from quire.config.speculators import find_verifier
from quire.config.vllm_flags import settle_vllm_flags, vllm_flags
from quire.errors import ConfigError, UnknownArgumentError, nearest
from quire.logger import init_logger
from quire.resolve import resolve

logger = init_logger(__name__)

_SECTIONS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]  # every section has a default factory: its class
    for f in dataclasses.fields(EngineConfig)
}
FLAGS: dict[str, FlagSpec] = {spec.name: spec for owner in _SECTIONS.values() for spec in flags_of(owner)}
"""Every flag by keyword name. The command line is derived from this table."""

DEFAULT_BUDGETS: dict[str, tuple[int, int]] = {"offline": (4096, 256), "serving": (2048, 128)}
"""(max_num_batched_tokens, max_num_seqs) by usage."""


class EngineArgs:
    """Keyword arguments by flag name: `EngineArgs("path", max_num_seqs=8)`. Every flag is also an attribute.

    Arguments of vLLM's that Quire has no flag for are accepted as on the command line of `quire serve`: without effect
    and with a warning, unless they change what is computed.

    Raises ConfigError for a value outside the flag's range, or an argument of vLLM's that cannot be ignored, and
    UnknownArgumentError for another name.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = {
        field.name: field
        for field in dataclasses.fields(
            dataclasses.make_dataclass(
                "Flags", [(spec.name, Any, dataclasses.field(default=spec.default)) for spec in FLAGS.values()]
            )
        )
    }
    """Every flag, so that `dataclasses.asdict` gives the keywords of an `LLM`, as programs for vLLM ask for them."""

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        if model is not None:
            flags["model"] = model
        if flags.get("hf_token") is True:  # vLLM's way to ask for the token that huggingface_hub has stored
            del flags["hf_token"]
        settled = _settle_foreign(flags)
        given = {name: FLAGS[name].read(value) for name, value in flags.items() if name in FLAGS}
        self._flags = given | {
            name: value
            for name, value in settled.items()
            if given.get(name, FLAGS[name].default) == FLAGS[name].default
        }

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Adds a flag for every argument to an `argparse.ArgumentParser`, which is returned."""
        return resolve("quire.cli.flexible_parser:add_engine_flags")(parser)

    @classmethod
    def from_cli_args(cls, args: Any) -> EngineArgs:
        """Returns the arguments in an `argparse.Namespace` of such a parser; other names in it are left out.

        Raises ConfigError as the constructor does.
        """
        return cls(**{name: value for name, value in vars(args).items() if name in FLAGS or name in vllm_flags()})

    def __getattr__(self, name: str) -> Any:
        spec = FLAGS.get(name)
        if spec is None or name.startswith("_"):
            raise AttributeError(f"EngineArgs has no flag {name!r}")
        return self._flags.get(name, spec.default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._flags = {**self._flags, **EngineArgs(**{name: value})._flags}

    def __repr__(self) -> str:
        return f"EngineArgs({', '.join(f'{k}={v!r}' for k, v in self._flags.items())})"

    @property
    def non_default(self) -> dict[str, Any]:
        """Flags that were given a value other than their default."""
        return {k: v for k, v in self._flags.items() if v != FLAGS[k].default}

    def section(self, owner: type) -> dict[str, Any]:
        """Returns the given values of one config dataclass, by its field names."""
        return {FLAGS[k].field_name: v for k, v in self._flags.items() if FLAGS[k].owner is owner}

    def create_engine_config(self, usage_context: str = "offline") -> EngineConfig:
        """Resolves the model, reads its config.json and fills in defaults. `usage_context` is "offline" or "serving".

        Raises ConfigError or ModelLoadError; allocates no memory and imports no torch.
        """
        sections = {name: owner(**self.section(owner)) for name, owner in _SECTIONS.items()}
        model = self._resolve_model(sections["model_config"])
        if model.hf_config.is_encoder:  # its tokens see one another: a text is computed whole and nothing is stored
            for name, off in (
                ("scheduler_config", "enable_chunked_prefill"),
                ("cache_config", "enable_prefix_caching"),
            ):
                sections[name] = dataclasses.replace(sections[name], **{off: False})
        scheduler = _fill_budgets(sections["scheduler_config"], model.model_len, usage_context)
        speculative = self._resolve_speculation(sections["speculative_config"], model)
        resolved = {
            "model_config": model,
            "scheduler_config": scheduler,
            "speculative_config": speculative,
            "lora_config": sections["lora_config"].settle(),
            "kv_transfer_config": sections["kv_transfer_config"].settle(),
        }
        config = EngineConfig(**{**sections, **resolved})
        _check_combination(config)
        return config

    def _resolve_model(self, model: ModelConfig, head: HFConfig | None = None) -> ModelConfig:
        """Returns the model with all fields filled in; of a checkpoint of speculators, the model it drafts for. `head`
        is the config.json of a head, which has no tokenizer and no class of its own."""
        download_dir = self.download_dir
        token = model.hf_token
        model_dir = resolve_model_dir(model.model, model.revision, download_dir, token=token)
        if head is None and (verifier := find_verifier(model_dir)) is not None:
            return self._resolve_model(
                dataclasses.replace(model, model=verifier, revision=None, served_model_name=list(model.names))
            )
        tokenizer_dir = model_dir
        if model.tokenizer is not None:
            tokenizer_dir = resolve_model_dir(
                model.tokenizer, model.tokenizer_revision, download_dir, token=token, tokenizer_only=True
            )
        hf = HFConfig.from_dir(model_dir, model.hf_overrides) if head is None else head
        pooling = resolve_pooling(
            hf, model_dir, runner=model.runner, convert=model.convert, pooler_config=model.pooler_config
        )
        resolved = dataclasses.replace(
            model,
            hf_token=None,  # no longer needed: no other process gets it
            model_dir=model_dir,
            tokenizer_dir=tokenizer_dir,
            hf_config=hf,
            generation_defaults=_generation_defaults(model, model_dir),
            pooling=pooling,
            implementation=choose_model_impl(model.model_impl, hf, pooling) if head is None else ModelImpl(),
        )
        return (
            dataclasses.replace(resolved, max_model_len=resolved.model_len) if model.max_model_len is None else resolved
        )

    def _resolve_speculation(self, config: SpeculativeConfig, target: ModelConfig) -> SpeculativeConfig:
        def find(model: str, revision: str | None) -> Path:
            return resolve_model_dir(model, revision, self.download_dir, token=self.hf_token)

        if target.model != self.model:  # a checkpoint of speculators, which drafts for the model
            if config.spec_model is not None:
                raise ConfigError(f"--spec-model {config.spec_model}: {self.model} is a drafter itself; leave one out")
            config = dataclasses.replace(config, spec_model=self.model)

        return dataclasses.replace(config, drafting=resolve_drafting(config, target, find, self._resolve_model))


AsyncEngineArgs = EngineArgs
"""vLLM's name for the arguments of an AsyncLLM: they are the same."""


def _settle_foreign(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our flags for those of `arguments` that are vLLM's and not ours. Raises ConfigError."""
    foreign = {name: value for name, value in arguments.items() if name not in FLAGS}
    if foreign.get("trust_remote_code") is False:  # `LLM` always passes it: do not read the table for it
        del foreign["trust_remote_code"]
    if not foreign:
        return {}
    known = {name for name, row in vllm_flags().items() if row.ignored or row.refused}
    for name in foreign.keys() - known:
        if name in vllm_flags():
            raise UnknownArgumentError(f"{name!r} is no argument of the engine: it is a flag of `quire serve`")
        hint = nearest(name, [*FLAGS, *known], "`quire serve --help=all` lists them")
        raise UnknownArgumentError(f"unknown argument {name!r}; {hint}")
    return {name: value for name, value in settle_vllm_flags(foreign, as_keywords=True).items() if name in FLAGS}


def _generation_defaults(model: ModelConfig, model_dir: Path) -> dict[str, Any]:
    """Returns generation_config.json of the model (or of the directory named) with the overrides."""
    defaults: dict[str, Any] = {}
    if model.generation_config != "vllm":
        directory = model_dir if model.generation_config == "auto" else Path(model.generation_config)
        found = read_object(directory, "generation_config.json")
        if found is None and model.generation_config != "auto":
            path = directory / "generation_config.json"
            raise ConfigError(f"--generation-config {model.generation_config}: {path} does not exist")
        defaults = found or {}
    return {**defaults, **(model.override_generation_config or {})}


def _fill_budgets(scheduler: SchedulerConfig, model_len: int, usage_context: str) -> SchedulerConfig:
    tokens, seqs = DEFAULT_BUDGETS[usage_context]
    max_num_seqs = scheduler.max_num_seqs or seqs
    max_tokens = scheduler.max_num_batched_tokens
    if max_tokens is None:
        max_tokens = max(tokens, max_num_seqs)
        if not scheduler.enable_chunked_prefill:
            max_tokens = max(max_tokens, model_len)
    return dataclasses.replace(
        scheduler,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_num_scheduled_tokens=scheduler.max_num_scheduled_tokens or max_tokens,
    )


def _check_combination(config: EngineConfig) -> None:
    scheduler, model, cache_dtype = config.scheduler_config, config.model_config, config.cache_config.cache_dtype
    if config.lora_config.enable_lora and model.implementation.name == TRANSFORMERS:
        raise ConfigError(
            f"--enable-lora: {model.hf_config.architecture} is run by the code of transformers (docs/fallback.md), "
            "where adapters are not supported; merge the adapter into the model's weights and serve those"
        )
    if cache_dtype in FP8_CACHE_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {cache_dtype}: keys and values of 8 bits are not implemented; bfloat16 (or auto, with a "
            "bfloat16 model) is the smallest. For more tokens raise --kv-cache-memory-bytes; --quantization int8 or "
            "int4 makes room for it"
        )
    budget, seqs = scheduler.max_num_batched_tokens or 0, scheduler.max_num_seqs or 0
    if budget < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below --max-num-seqs {seqs}: every running request needs one token"
        )
    if not scheduler.enable_chunked_prefill and budget < model.model_len:
        why, remedy = "chunked prefill is off", " or drop --no-enable-chunked-prefill"
        if model.hf_config.is_encoder:
            why, remedy = "an encoder computes texts whole", ""
        raise ConfigError(
            f"--max-num-batched-tokens {budget} is below the context length {model.model_len} and {why}: a long prompt "
            f"could never run; raise the budget, lower --max-model-len{remedy}"
        )
    _check_context(model)
    _check_parallel(config)
    _check_transfer(config)
    if config.observability_config.kv_events.is_enabled and not config.cache_config.enable_prefix_caching:
        logger.warning("--kv-events-config publishes nothing: nothing is cached; enable prefix caching")


def _check_transfer(config: EngineConfig) -> None:
    """Raises ConfigError for an engine whose blocks cannot be stored."""
    if config.kv_transfer_config.connector is None:
        return
    name = config.kv_transfer_config.kv_connector
    why = {
        f"the model {config.model_config.name} sees its texts whole": config.model_config.hf_config.is_encoder
        and "there are no KV blocks; leave the store out",
        "--no-enable-prefix-caching": not config.cache_config.enable_prefix_caching
        and "stored blocks are found as cached prefixes are; enable prefix caching",
        "workers on several machines": not config.parallel_config.has_own_workers
        and "each worker's blocks are on its own machine, and nothing looks for them there yet; leave one of them out",
        "--device cuda": config.device_config.device == "cuda" and "only blocks in main memory can be stored yet",
    }
    for what, reason in why.items():
        if reason:
            raise ConfigError(f"{'--kv-store' if name == STORE else name} with {what}: {reason}")


def _check_parallel(config: EngineConfig) -> None:
    """Raises ConfigError for what several workers of an engine, or engines that share experts, cannot do yet."""
    parallel, model = config.parallel_config, config.model_config
    remedy = f"the {parallel.world_size} workers of --tensor-parallel-size and --pipeline-parallel-size"
    if parallel.shares_experts:
        remedy = f"--enable-expert-parallel with --data-parallel-size {parallel.data_parallel_size}"
    elif parallel.world_size == 1:
        return
    why = {
        **(_sharing_refusals(config) if parallel.shares_experts else {}),
        f"an encoder ({model.hf_config.architecture})": model.hf_config.is_encoder
        and "texts that are seen whole cannot be divided yet; only decoders can be",
        f"the code of transformers, which {model.hf_config.architecture} needs": model.implementation.name
        == TRANSFORMERS
        and "its modules cannot be divided among workers",
        "--device cuda": config.device_config.device == "cuda" and "only CPUs compute with several workers yet",
    }
    for what, reason in why.items():
        if reason:
            raise ConfigError(f"{what}: {reason}; leave it out, or {remedy}")
    if config.parallel_config.pipeline_parallel_size > 1:
        config.parallel_config.layer_partition  # noqa: B018  # raises for what is no list


def _sharing_refusals(config: EngineConfig) -> dict[str, object]:
    """Returns what engines that share experts cannot do besides, though several workers of one engine can."""
    drafting = config.speculative_config.drafting
    return {
        f"--spec-model {drafting and drafting.method}": drafting is not None
        and drafting.model is not None
        and "a model or a class that drafts does not step with the other engines yet; ngram and suffix can be used",
        f"--runner {config.model_config.runner}": config.model_config.pooling is not None
        and "models that pool cannot be divided among engines yet",
    }


def _check_context(model: ModelConfig) -> None:
    """Raises ConfigError for a context that is longer than the model's own."""
    positions = model.hf_config.num_positions
    if positions is not None and model.model_len > positions:
        raise ConfigError(
            f"--max-model-len {model.model_len}: the model has learned {positions} positions and none beyond; lower it"
        )
    longest = model.hf_config.longest_context_len
    if model.model_len > longest:
        wish = f"--max-model-len {model.model_len} is more than the {longest} tokens that {model.hf_config.path} gives"
        if not envs.ALLOW_LONG_MAX_MODEL_LEN.flag():
            raise ConfigError(
                f"{wish}: what follows them would be wrong or no text at all; lower it, or set "
                f"{envs.ALLOW_LONG_MAX_MODEL_LEN.name}=1 for a model that can"
            )
        logger.warning("%s: outputs beyond them may be wrong", wish)
