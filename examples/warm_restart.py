"""An engine that is killed leaves the KV blocks of its prompts to the next: python examples/warm_restart.py"""

import os
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

from quire import LLM, RequestOutput, SamplingParams

DOCUMENT = (
    "A KV block is a fixed piece of the KV cache that holds the keys and values of a few consecutive tokens. " * 30
)
BLOCK_SIZE = 16


def answer(llm: LLM) -> RequestOutput:
    """Asks an engine about the document."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(f"{DOCUMENT}\nWhat is a KV block?", params, use_tqdm=False)
    return output


def count(output: RequestOutput) -> tuple[int, int]:
    """Returns how many tokens of the prompt were read, and how many it has."""
    return output.num_cached_tokens or 0, len(output.prompt_token_ids or [])


def report(output: RequestOutput) -> None:
    num_read, num_tokens = count(output)
    print(f"{num_read} of {num_tokens} tokens were read, and {output.outputs[0].token_ids} came next", flush=True)


def is_stored(llm: LLM) -> bool:
    """Returns whether the engine finds the prompt in the store, but for the last block, once its memory has none."""
    llm.reset_prefix_cache()
    num_read, num_tokens = count(answer(llm))
    return num_tokens - num_read <= BLOCK_SIZE


if len(sys.argv) > 1:  # the engine that is killed
    llm = LLM(kv_store=sys.argv[1])
    first = answer(llm)
    while not is_stored(llm):  # blocks are stored beside the work, and later than their answer
        time.sleep(0.01)
    report(first)
    time.sleep(600)
else:
    with TemporaryDirectory() as directory:
        killed = Popen([sys.executable, __file__, directory], start_new_session=True, stdout=PIPE, text=True)
        assert killed.stdout is not None
        print(killed.stdout.readline(), end="")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        num_bytes = sum(path.stat().st_size for path in Path(directory).glob("*.kvx"))
        print(f"it was killed, and {num_bytes:,} bytes are stored")
        report(answer(LLM(kv_store=directory)))
