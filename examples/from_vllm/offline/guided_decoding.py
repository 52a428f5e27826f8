"""The same, by the names of vLLM's earlier versions."""

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams
from vllm.utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
llm = LLM(parser.parse_args().model, guided_decoding_backend="xgrammar", swap_space=4, disable_log_requests=True)

choice = GuidedDecodingParams(choice=["Positive", "Negative"])
params = SamplingParams(guided_decoding=choice)
print(llm.generate("Classify this sentiment: Quire is wonderful!", sampling_params=params)[0].outputs[0].text)
