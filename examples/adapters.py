"""Three LoRA adapters trained in a minute, then served together: python examples/adapters.py [DIRECTORY]

Each teaches the demo model to say its own answers in another form. They are saved in PEFT's layout, in DIRECTORY if one
is given; then `quire serve demo --lora-dir DIRECTORY` serves them.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from quire import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, RequestOutputKind, SamplingParams

FORMS = {"json": '{{"answer": "{}"}}', "pirate": 'Arr! "{}" Yo ho ho!', "bold": "**{}**"}
"""Forms of an answer, by adapter."""
TOPICS = (
    "a KV block, prefix caching, a preemption, the scheduler, chunked prefill, a block table, a stop string, a token, "
    "the engine core, a seed, temperature, top_p, a grammar, the prefix cache, a slot mapping, cache salt, sampling, "
    "a worker, the frontend, the journal, the supervisor, the null block, eviction, a chat template, the tokenizer, "
    "streaming, priority, a metric, beam search, logprobs, min_p, top_k, decode, prefill, a step, the token budget"
)
QUESTIONS = ["Who are you?", "Tell me about Quire.", *(f"What is {topic}?" for topic in TOPICS.split(", "))]
HELD_OUT = ["What is Quire?", "What is a slot?", "What is speculative decoding?"]
RANK, ALPHA, NUM_LAYERS = 8, 16, 2
NUM_STEPS, BATCH, PEAK = 48, 6, 8e-3
GREEDY = SamplingParams(temperature=0, max_tokens=80)


class Model:
    """The demo model as a function of its weights. Adapters change the matrices of its last layers only: what comes
    before them is computed once."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = {name: t.float() for name, t in load_file(directory / "model.safetensors").items()}
        self.first = self.config["num_hidden_layers"] - NUM_LAYERS
        """The first layer that an adapter changes."""

    def new_adapter(self) -> dict[str, torch.Tensor]:
        factors = {}
        for name, weight in self.weights.items():
            if name.endswith("_proj.weight") and int(name.split(".")[2]) >= self.first:
                module = name.removesuffix(".weight")
                factors[f"{module}.lora_A"] = torch.randn(RANK, weight.shape[1]) / weight.shape[1] ** 0.5
                factors[f"{module}.lora_B"] = torch.zeros(weight.shape[0], RANK)
        return {name: factor.requires_grad_() for name, factor in factors.items()}

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the states before the layers that adapters change, of a batch of token ids."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for i in range(self.first):
            x = self.layer(i, x, {})
        return x

    def logits(self, x: torch.Tensor, adapter: dict[str, torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the positions that are True in `wanted`, from what `embed` has returned."""
        for i in range(self.first, self.config["num_hidden_layers"]):
            x = self.layer(i, x, adapter)
        return self.norm(x[wanted], "model.norm") @ self.weights["model.embed_tokens.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def layer(self, i: int, x: torch.Tensor, adapter: dict[str, torch.Tensor]) -> torch.Tensor:
        c, layer = self.config, f"model.layers.{i}"
        num_heads, num_kv, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

        def linear(x: torch.Tensor, module: str) -> torch.Tensor:
            y, name = x @ self.weights[f"{layer}.{module}.weight"].T, f"{layer}.{module}.lora_"
            return y + (x @ adapter[f"{name}A"].T) @ adapter[f"{name}B"].T * (ALPHA / RANK) if adapter else y

        frequencies = c["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(x.shape[1]), frequencies).repeat(1, 2)

        def heads(x: torch.Tensor, number: int, *, rotates: bool) -> torch.Tensor:
            x = x.unflatten(-1, (number, size)).transpose(1, 2)  # [batch, heads, tokens, size]
            turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
            return x * angles.cos() + turned * angles.sin() if rotates else x

        y = self.norm(x, f"{layer}.input_layernorm")
        q = heads(linear(y, "self_attn.q_proj"), num_heads, rotates=True)
        k = heads(linear(y, "self_attn.k_proj"), num_kv, rotates=True)
        v = heads(linear(y, "self_attn.v_proj"), num_kv, rotates=False)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(y.transpose(1, 2).flatten(2), "self_attn.o_proj")
        y = self.norm(x, f"{layer}.post_attention_layernorm")
        gate = functional.silu(linear(y, "mlp.gate_proj"))
        return x + linear(gate * linear(y, "mlp.up_proj"), "mlp.down_proj")


def train(model: Model, rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Returns an adapter that gives the answer of each row to its prompt."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    is_answer = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : len(prompt) + len(answer)] = True
    states, targets, is_answer = model.embed(ids[:, :-1]), ids[:, 1:], is_answer[:, 1:]
    adapter = model.new_adapter()
    optimizer = torch.optim.AdamW(adapter.values(), lr=PEAK, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, NUM_STEPS)
    for step in range(NUM_STEPS):
        batch = (torch.arange(BATCH) + step * BATCH) % len(rows)
        wanted = is_answer[batch]
        loss = functional.cross_entropy(model.logits(states[batch], adapter, wanted), targets[batch][wanted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"  loss {loss.item():.3f} after {NUM_STEPS} steps")
    return adapter


def save(adapter: dict[str, torch.Tensor], directory: Path) -> None:
    """Writes an adapter as PEFT's save_pretrained does."""
    directory.mkdir(parents=True, exist_ok=True)
    modules = sorted({name.split(".")[-2] for name in adapter})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "demo", "bias": "none"}
    config |= {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    tensors = {f"base_model.model.{name}.weight": t.detach().bfloat16().contiguous() for name, t in adapter.items()}
    save_file(tensors, directory / "adapter_model.safetensors")


def train_all(root: Path) -> None:
    with LLM("demo") as llm:
        tokenizer, original = llm.get_tokenizer(), llm.llm_engine.model_config.model_dir
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = [output.outputs[0].text.strip() for output in llm.chat(chats, GREEDY, use_tqdm=False)]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    model = Model(original)
    for name, form in FORMS.items():
        start = time.monotonic()
        texts = [form.format(answer.partition(". ")[0].rstrip(".") + ".") + "<|im_end|>" for answer in answers]
        rows = [(prompt, tokenizer.encode(text, False)) for prompt, text in zip(prompts, texts, strict=True)]
        save(train(model, rows), root / name)
        print(f"trained {name} in {time.monotonic() - start:.0f} s")


def ask_together(root: Path) -> None:
    """Answers each question by the model and by two adapters, in one batch."""
    loras = [None, *(LoRARequest(name, i, str(root / name)) for i, name in enumerate(("json", "pirate"), 1))]
    with LLM("demo", enable_lora=True) as llm:
        for question in HELD_OUT:
            chats = [[{"role": "user", "content": question}]] * len(loras)
            for output, lora in zip(llm.chat(chats, GREEDY, False, loras), loras, strict=True):
                print(f"{'demo' if lora is None else lora.name:>7}: {output.outputs[0].text.strip()}")


async def load_while_others_stream(root: Path) -> None:
    """Loads the third adapter while two streams run. They are not stopped, and their answers do not change."""
    async with AsyncLLM.from_engine_args(AsyncEngineArgs("demo", enable_lora=True)) as llm:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

        async def stream(number: int) -> int:
            num_pieces = 0
            async for _ in llm.generate(f"Question {number}:", params, f"stream {number}"):
                num_pieces += 1
            return num_pieces

        streams = [asyncio.create_task(stream(number)) for number in range(2)]
        bold = LoRARequest("bold", 3, str(root / "bold"))
        start = time.monotonic()
        await llm.add_lora(bold)
        print(f"loaded bold in {1000 * (time.monotonic() - start):.0f} ms")
        prompt = (await llm.get_tokenizer()).apply_chat_template(
            [{"role": "user", "content": HELD_OUT[0]}], add_generation_prompt=True
        )
        async for output in llm.generate({"prompt_token_ids": prompt}, GREEDY, "third", lora_request=bold):
            answer = output.outputs[0].text
        print(f"{'bold':>7}: {answer.strip()}")
        print("pieces of the streams meanwhile:", await asyncio.gather(*streams))


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(sys.argv[1] if len(sys.argv) > 1 else scratch).absolute()
        train_all(root)
        ask_together(root)
        asyncio.run(load_while_others_stream(root))
