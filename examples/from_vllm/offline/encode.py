"""A vector for each token of a text."""

from vllm import LLM, PoolingParams, PoolingRequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="intfloat/e5-small")
llm = LLM(model=parser.parse_args().model, runner="pooling", convert="embed", max_model_len=256)

outputs: list[PoolingRequestOutput] = llm.encode(
    ["Prefix caching", "A KV block is"], PoolingParams(use_activation=False), pooling_task="token_embed"
)
for output in outputs:
    rows, columns = output.outputs.data.shape
    print(f"{len(output.prompt_token_ids)} tokens: {rows} x {columns}")
