"""Certifies transformers' decoders for `--model-impl transformers`, and writes the table of what was found.

    python -m tools.certify_fallback [--check] [CLASS ...]

Every class of transformers' causal language models is made small and tried (`worker/fallback/trial.py`), each in a
process of its own with a limit of time. With names only those rows are written anew. `--check` writes nothing and ends
with 1 where the table says something else.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import tomllib
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.config.hf_config import split_architecture
from quire.config.model_impl import TABLE, native_models
from quire.errors import QuireError
from quire.resolve import resolve
from quire.worker.attention.registry import BACKENDS
from quire.worker.fallback.shrink import WINDOW, shrink
from quire.worker.fallback.trial import STATEFUL, certify

TIME_LIMIT_S = 120.0
PIPE_BYTES = 4096
"""Length of an answer that a pipe takes at once."""
MIXED = ["full_attention", "sliding_attention"] * 2
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}
EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "CohereCompassForCausalLM": {
        "layer_types": MIXED,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in MIXED},
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "DeepseekV2ForCausalLM": {**EXPERTS, "topk_method": "greedy"},
    "Dots1ForCausalLM": EXPERTS,
    "Dots3NoteForCausalLM": {"per_layer_config": None, "head_dim": 24},
    "GraniteMoeHybridForCausalLM": {
        "position_embedding_type": "rope",
        "layer_types": ["attention"] * 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "MinistralForCausalLM": {"head_dim": 16, "layer_types": MIXED},
    "NemotronForCausalLM": {"head_dim": 16, "num_key_value_heads": 2},
    "Qwen2ForCausalLM": WINDOWS,
    "Qwen2MoeForCausalLM": WINDOWS,
    "Qwen3ForCausalLM": WINDOWS,
    "Starcoder2ForCausalLM": {"sliding_window": WINDOW},
    "XLNetLMHeadModel": {"d_head": 16},
}
"""Keys of a tiny config beside the sizes, where the defaults of a class do not fit together or hide a switch."""


ENCODERS = """Bart BertGenerationDecoder BertLMHead BigBird BigBirdPegasus Blenderbot BlenderbotSmall Camembert
Data2VecText Electra Ernie MBart Marian MegatronBert Mvp PLBart Pegasus ProphetNet ReformerModelWithLMHead RemBert
RoCBert RoFormer Roberta RobertaPreLayerNorm TrOCR Whisper XLMRoberta XLMRobertaXL XLMWithLMHead XLNetLMHead Xmod"""
OTHER_INPUTS = """Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration Gemma4Assistant
Gemma4ForConditionalGeneration Gemma4UnifiedAssistant Gemma4UnifiedForConditionalGeneration Git
GotOcr2ForConditionalGeneration Mllama Moshi MossTranscribeDiarizeForConditionalGeneration Musicgen MusicgenMelody"""
"""Classes that are no text decoders: heads of encoders and of encoder-decoders; drafters, and decoders beside images or
sound."""


def is_text_decoder(name: str) -> bool:
    """Returns whether a class completes text by itself."""
    stem = name.removesuffix("ForCausalLM").removesuffix("Model")
    return not {name, stem} & {*ENCODERS.split(), *OTHER_INPUTS.split()}


def classes() -> dict[str, str]:
    """Returns the `model_type` of each class."""
    return {name: kind for kind, name in reversed(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}


def tiny_config(name: str) -> Any:
    """Returns the config of the tiny model of a class."""
    model_class = getattr(transformers, name)
    config = model_class.config_class()
    causal = {"is_decoder": True} if hasattr(config, "is_decoder") else {}
    return shrink(config, **causal, **OVERRIDES.get(name, {}))


def try_class(name: str) -> tuple[float, str]:
    """Returns the largest difference, and the reason of a refusal or an empty string."""
    model_class = getattr(transformers, name)
    if getattr(model_class, "_is_stateful", False) and name not in OVERRIDES:
        return 0.0, STATEFUL
    try:
        return certify(model_class, tiny_config(name)), ""
    except QuireError as e:
        return 0.0, str(e)


def _child(name: str) -> tuple[float, str]:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        return try_class(name)
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return 0.0, f"no tiny model of it can be made: {type(e).__name__}: {str(e)[:160]} ({where.name})"


def try_apart(name: str) -> tuple[float, str]:
    """Returns what `try_class` does, from a process of its own, which has what this one has imported."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(theirs, json.dumps(_child(name)).encode()[:PIPE_BYTES])
        os._exit(0)
    os.close(theirs)
    is_ready, _, _ = select.select([ours], [], [], TIME_LIMIT_S)
    answer = os.read(ours, PIPE_BYTES) if is_ready else None
    os.close(ours)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if answer is None:
        return 0.0, f"its trial takes more than {TIME_LIMIT_S:.0f} s"
    difference, refused = json.loads(answer) if answer else (0.0, "its trial crashed")
    return difference, refused


def read_table() -> dict[str, dict[str, Any]]:
    """Returns the rows of the present table; none where it was made with another version of transformers."""
    if not TABLE.exists():
        return {}
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return dict(table["models"]) if table["transformers"] == transformers.__version__ else {}


def write_table(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the table."""
    lines = [
        "# Written by `python -m tools.certify_fallback`; do not edit. Which classes of transformers run on Quire's",
        "# paged cache and kernels (--model-impl transformers), and why others are refused. `difference`: the largest",
        "# of a logit beside transformers' own run, relative to the largest logit, in float32.",
        f'transformers = "{transformers.__version__}"',
        "",
        "[models]",
    ]
    for name, row in sorted(rows.items()):
        value = f'refused = "{row["refused"]}"' if row.get("refused") else f"difference = {row['difference']:.1e}"
        lines.append(f"{name} = {{ {value} }}")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Runs the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    for backend in BACKENDS.values():
        resolve(backend)  # here, so that children need not import it
    before = read_table()
    rows = dict(before) if options.names else {}
    for name in options.names or sorted(classes()):
        difference, refused = try_apart(name)
        refused = " ".join(refused.split()).replace("\\", "/").replace('"', "'")[:200]
        rows[name] = {"refused": refused} if refused else {"difference": difference}
        print(f"{name:42} {refused or f'{difference:.1e}'}", flush=True)
    known = {name: bool(row.get("refused")) for name, row in before.items()}
    changed = [name for name, row in rows.items() if known.get(name) is not bool(row.get("refused"))]
    print(f"changed: {', '.join(changed) or 'none'}")
    certified = {name for name, row in rows.items() if not row.get("refused")}
    native = {name for name in rows if f"{split_architecture(name)[0]}ForCausalLM" in native_models()}
    for what, names in (("classes", set(rows)), ("text decoders", {name for name in rows if is_text_decoder(name)})):
        counts = (
            f"{len(names & certified)} are certified, {len(names & native)} native, {len(names & (certified | native))}"
        )
        print(f"of {len(names)} {what} {counts} one of the two")
    if options.check:
        return 1 if changed else 0
    write_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
