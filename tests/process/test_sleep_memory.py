"""Sleep gives memory back to the operating system, and waking up takes it again: resident memory of a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
KV_CACHE = 128 * MIB
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}
SCRIPT = """
import json, os, sys
from quire import LLM, SamplingParams

llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, device="cpu",
          kv_cache_memory_bytes=int(sys.argv[2]), max_num_seqs=4)
params = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def tokens():
    return list(llm.generate({"prompt_token_ids": list(range(40, 80))}, params, use_tqdm=False)[0].outputs[0].token_ids)

def fill_cache(worker):
    for cache in worker.runner.kv_cache.caches.values():
        cache.key.fill_(0)
        cache.value.fill_(0)

def count_weights(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())

def use():
    llm.reset_prefix_cache()
    llm.collective_rpc(fill_cache)
    found["tokens"].append(tokens())
    found["awake"].append(resident())

found = {"weights": llm.apply_model(count_weights)[0], "tokens": [], "awake": [], "asleep": []}
use()
for level in (1, 2, 2):
    llm.sleep(level)
    found["asleep"].append(resident())
    llm.wake_up()
    use()
print(json.dumps(found))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads resident memory from /proc")
def test_resident_memory_falls_and_tokens_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    environment |= {"QUIRE_ENABLE_MULTIPROCESSING": "0", "QUIRE_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(KV_CACHE)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    awake, asleep, weights = found["awake"], found["asleep"], found["weights"]
    with capsys.disabled():
        mib = [f"{bytes_ / MIB:.0f}" for pair in zip(awake, [*asleep, 0], strict=True) for bytes_ in pair][:-1]
        print(f"\nMiB awake, asleep at 1, awake, at 2, awake, at 2, awake: {', '.join(mib)}", end=" ")
        print(f"(weights {weights / MIB:.0f}, KV cache {KV_CACHE / MIB:.0f})")
    assert awake[0] - asleep[0] > 0.95 * KV_CACHE
    for before, level_2 in ((awake[1], asleep[1]), (awake[2], asleep[2])):
        assert before - level_2 > 0.95 * (KV_CACHE + weights)
    assert awake[-1] < awake[0] * 1.05, "every sleep leaves something behind"
    assert all(answer == found["tokens"][0] for answer in found["tokens"])
