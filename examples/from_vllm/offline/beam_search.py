"""The most likely continuations of prompts, of text and of tokens."""

from vllm import LLM
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.sampling_params import BeamSearchParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--beam-width", type=int, default=3)
args = parser.parse_args()

llm = LLM(model=args.model, max_logprobs=2 * args.beam_width)
tokenizer = llm.get_tokenizer()
prompts = [
    TextPrompt(prompt="Prefix caching is"),
    TokensPrompt(prompt_token_ids=tokenizer.encode("A KV block holds")),
    {"prompt": "The scheduler"},
]
params = BeamSearchParams(beam_width=args.beam_width, max_tokens=12, length_penalty=1.0)
for output in llm.beam_search(prompts, params):
    for beam in output.sequences:
        print(f"{beam.cum_logprob:8.3f}  {len(beam.tokens)} tokens  {beam.text!r}")
