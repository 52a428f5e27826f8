"""The table of models: from the architecture in config.json to the class that runs it."""

from __future__ import annotations

from typing import Any

from quire.config.hf_config import HFConfig
from quire.config.model_impl import hint_of_names
from quire.config.speculators import EAGLE, EAGLE3
from quire.errors import UnsupportedModelError
from quire.resolve import resolve

MODELS: dict[str, str] = {
    "AfmoeForCausalLM": "quire.worker.models.sigmoid_moe:AfmoeForCausalLM",
    "ApertusForCausalLM": "quire.worker.models.llama:ApertusForCausalLM",
    "ArceeForCausalLM": "quire.worker.models.llama:ArceeForCausalLM",
    "AriaTextForCausalLM": "quire.worker.models.llama:AriaTextForCausalLM",
    "BertModel": "quire.worker.models.bert:BertModel",
    "BioGptForCausalLM": "quire.worker.models.gpt:BioGptForCausalLM",
    "BloomForCausalLM": "quire.worker.models.alibi:BloomForCausalLM",
    "CodeGenForCausalLM": "quire.worker.models.gpt:CodeGenForCausalLM",
    "Cohere2ForCausalLM": "quire.worker.models.gpt_neox:Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM": "quire.worker.models.gpt_neox:Cohere2MoeForCausalLM",
    "CohereForCausalLM": "quire.worker.models.gpt_neox:CohereForCausalLM",
    "CwmForCausalLM": "quire.worker.models.llama:CwmForCausalLM",
    "DeepseekV2ForCausalLM": "quire.worker.models.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "quire.worker.models.deepseek:DeepseekV3ForCausalLM",
    "Dots1ForCausalLM": "quire.worker.models.sigmoid_moe:Dots1ForCausalLM",
    "Ernie4_5ForCausalLM": "quire.worker.models.ernie:Ernie45ForCausalLM",
    "Ernie4_5_MoeForCausalLM": "quire.worker.models.ernie:Ernie45MoeForCausalLM",
    "Exaone4ForCausalLM": "quire.worker.models.llama:Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM": "quire.worker.models.sigmoid_moe:ExaoneMoeForCausalLM",
    "FalconForCausalLM": "quire.worker.models.gpt_neox:FalconForCausalLM",
    "FlexOlmoForCausalLM": "quire.worker.models.olmo2:FlexOlmoForCausalLM",
    "GPT2ForCausalLM": "quire.worker.models.gpt:GPT2ForCausalLM",
    "GPTBigCodeForCausalLM": "quire.worker.models.gpt:GPTBigCodeForCausalLM",
    "GPTJForCausalLM": "quire.worker.models.gpt:GPTJForCausalLM",
    "GPTNeoForCausalLM": "quire.worker.models.gpt:GPTNeoForCausalLM",
    "GPTNeoXForCausalLM": "quire.worker.models.gpt_neox:GPTNeoXForCausalLM",
    "Gemma2ForCausalLM": "quire.worker.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "quire.worker.models.gemma:Gemma3ForCausalLM",
    "Gemma4ForCausalLM": "quire.worker.models.gemma:Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "quire.worker.models.gemma:Gemma4ForCausalLM",
    "GemmaForCausalLM": "quire.worker.models.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "quire.worker.models.llama:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "quire.worker.models.sigmoid_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "quire.worker.models.deepseek:Glm4MoeLiteForCausalLM",
    "GlmForCausalLM": "quire.worker.models.llama:GlmForCausalLM",
    "GptOssForCausalLM": "quire.worker.models.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "quire.worker.models.granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "quire.worker.models.granite:GraniteMoeForCausalLM",
    "GraniteMoeSWAForCausalLM": "quire.worker.models.granite:GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM": "quire.worker.models.granite:GraniteMoeForCausalLM",
    "GraniteSWAForCausalLM": "quire.worker.models.granite:GraniteSWAForCausalLM",
    "HYV3ForCausalLM": "quire.worker.models.sigmoid_moe:HYV3ForCausalLM",
    "HeliumForCausalLM": "quire.worker.models.llama:HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM": "quire.worker.models.hunyuan:HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM": "quire.worker.models.hunyuan:HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM": "quire.worker.models.granite:HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM": "quire.worker.models.gpt_neox:Jais2ForCausalLM",
    "LagunaForCausalLM": "quire.worker.models.sigmoid_moe:LagunaForCausalLM",
    "Llama4ForCausalLM": "quire.worker.models.llama4:Llama4ForCausalLM",
    "LlamaForCausalLM": "quire.worker.models.llama:LlamaForCausalLM",
    "MellumForCausalLM": "quire.worker.models.qwen:MellumForCausalLM",
    "MiniCPM3ForCausalLM": "quire.worker.models.deepseek:MiniCPM3ForCausalLM",
    "MiniMaxM2ForCausalLM": "quire.worker.models.sigmoid_moe:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "quire.worker.models.llama:Ministral3ForCausalLM",
    "MinistralForCausalLM": "quire.worker.models.llama:MinistralForCausalLM",
    "MistralForCausalLM": "quire.worker.models.llama:MistralForCausalLM",
    "MixtralForCausalLM": "quire.worker.models.llama:MixtralForCausalLM",
    "ModernBertModel": "quire.worker.models.modernbert:ModernBertModel",
    "MptForCausalLM": "quire.worker.models.alibi:MptForCausalLM",
    "NanoChatForCausalLM": "quire.worker.models.llama:NanoChatForCausalLM",
    "NemotronForCausalLM": "quire.worker.models.gpt_neox:NemotronForCausalLM",
    "OPTForCausalLM": "quire.worker.models.opt:OPTForCausalLM",
    "Olmo2ForCausalLM": "quire.worker.models.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "quire.worker.models.olmo2:Olmo3ForCausalLM",
    "OlmoForCausalLM": "quire.worker.models.gpt_neox:OlmoForCausalLM",
    "OlmoeForCausalLM": "quire.worker.models.olmo2:OlmoeForCausalLM",
    "PersimmonForCausalLM": "quire.worker.models.gpt_neox:PersimmonForCausalLM",
    "Phi3ForCausalLM": "quire.worker.models.llama:Phi3ForCausalLM",
    "PhiForCausalLM": "quire.worker.models.gpt_neox:PhiForCausalLM",
    "PhimoeForCausalLM": "quire.worker.models.llama:PhimoeForCausalLM",
    "Qwen2ForCausalLM": "quire.worker.models.qwen:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "quire.worker.models.qwen:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "quire.worker.models.qwen:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "quire.worker.models.qwen:Qwen3MoeForCausalLM",
    "RobertaModel": "quire.worker.models.bert:RobertaModel",
    "SeedOssForCausalLM": "quire.worker.models.seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "quire.worker.models.llama:SmolLM3ForCausalLM",
    "SolarOpenForCausalLM": "quire.worker.models.sigmoid_moe:SolarOpenForCausalLM",
    "StableLmForCausalLM": "quire.worker.models.gpt_neox:StableLmForCausalLM",
    "Starcoder2ForCausalLM": "quire.worker.models.gpt_neox:Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM": "quire.worker.models.gemma:VaultGemmaForCausalLM",
    "XGLMForCausalLM": "quire.worker.models.gpt:XGLMForCausalLM",
    "XLMRobertaModel": "quire.worker.models.bert:RobertaModel",
    "YoutuForCausalLM": "quire.worker.models.deepseek:YoutuForCausalLM",
}
"""Dotted class names by `HFConfig.family`; heads for pooling have no rows of their own. They are imported on demand.

To add a row: docs/recipes/add_a_model.md.
"""


HEADS: dict[str, str] = {
    EAGLE: "quire.worker.models.eagle:EagleHead",
    EAGLE3: "quire.worker.models.eagle3:Eagle3Head",
}
"""Heads that draft, by method: `cls(hf, target, taps, names of stored tensors)` is an EagleHead."""


def get_model_class(hf: HFConfig) -> Any:
    """Returns the class of a model's family: `cls(hf)`, of an encoder `cls(hf, pooling)`, is an nn.Module. Raises
    UnsupportedModelError naming similar ones."""
    if hf.family in MODELS:
        return resolve(MODELS[hf.family])
    hint = hint_of_names(hf.architecture, MODELS)
    raise UnsupportedModelError(f"architecture {hf.architecture!r} of config.json is not implemented; {hint}")
