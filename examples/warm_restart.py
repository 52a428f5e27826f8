"""An engine that is killed leaves the KV blocks of its prompts to the next: python examples/warm_restart.py"""

import os
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from quire import LLM, SamplingParams

DOCUMENT = (
    "A KV block is a fixed piece of the KV cache that holds the keys and values of a few consecutive tokens. " * 30
)


def answer(directory: str) -> str:
    """Starts an engine with a store, and asks it about the document."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = LLM(kv_store=directory).generate(f"{DOCUMENT}\nWhat is a KV block?", params, use_tqdm=False)
    num_tokens, num_read = len(output.prompt_token_ids or []), output.num_cached_tokens
    return f"{num_read} of {num_tokens} tokens were read, and {output.outputs[0].token_ids} came next"


def stored_bytes(directory: str) -> int:
    """Returns the bytes of all extents."""
    return sum(path.stat().st_size for path in Path(directory).glob("*.kvx"))


if len(sys.argv) > 1:  # the engine that is killed
    print(answer(sys.argv[1]), flush=True)
    time.sleep(600)
else:
    with TemporaryDirectory() as directory:
        first = Popen([sys.executable, __file__, directory], start_new_session=True)
        before = -1
        while not before or before != stored_bytes(directory):  # until it has answered, and everything is stored
            before = stored_bytes(directory)
            time.sleep(1)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        print(f"it was killed, and {before:,} bytes are stored")
        print(answer(directory))
