"""Calls into the workers: a method by name, and a function on the model."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, so that functions can be passed

from vllm import LLM
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
llm = LLM(model=parser.parse_args().model)

(num_parameters,) = llm.apply_model(lambda model: sum(parameter.numel() for parameter in model.parameters()))
print("parameters:", num_parameters)
print("workers:", llm.collective_rpc(lambda worker: type(worker).__name__))
