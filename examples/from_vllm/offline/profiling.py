"""A trace of torch's profiler around one call."""

import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import ProfilerConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
args = parser.parse_args()

with tempfile.TemporaryDirectory() as directory:
    llm = LLM(
        model=args.model,
        tensor_parallel_size=1,
        profiler_config=ProfilerConfig(profiler="torch", torch_profiler_dir=directory),
    )
    llm.start_profile()
    outputs = llm.generate(["Hello", "Prefix caching"], SamplingParams(temperature=0.8, max_tokens=4))
    llm.stop_profile()
    print("texts:", len(outputs))
    print("traces:", sum(path.is_file() and path.stat().st_size > 0 for path in Path(directory).rglob("*")))
