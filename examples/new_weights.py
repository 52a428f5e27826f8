"""An engine that sleeps while its model is trained, and goes on with the new weights: python examples/new_weights.py"""

import shutil
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams

llm = LLM(*sys.argv[1:])
params = SamplingParams(temperature=0, max_tokens=24)


def answer() -> str:
    (output,) = llm.generate("What is prefix caching?", params, use_tqdm=False)
    return output.outputs[0].text


def train(checkpoint: Path, result: Path) -> None:
    """Stands for a training step, in whatever process: it leaves a checkpoint of the same architecture."""
    shutil.copytree(checkpoint, result)
    for path in result.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: t * 8 if name.endswith("down_proj.weight") else t for name, t in tensors.items()}, path)


first = answer()
print(f"version {llm.get_weight_version()}: {first!r}")

llm.sleep(2)  # the memory of weights and KV cache goes back to the system
original = llm.llm_engine.model_config.model_dir
with tempfile.TemporaryDirectory() as directory:
    train(original, Path(directory) / "step-1")
    llm.update_weights(Path(directory) / "step-1", version="step 1")  # weights are there again, the new ones
    llm.wake_up(["kv_cache"])
    print(f"version {llm.get_weight_version()}: {answer()!r}")

llm.update_weights(original, version="the old ones")  # in place, on a running engine
print(f"version {llm.get_weight_version()}: the same answer as at first: {answer() == first}")
