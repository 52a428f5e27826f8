"""A long common beginning: with prefix caching it is computed once, and the texts stay the same."""

import time

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.utils.argparse_utils import FlexibleArgumentParser

SHARED = "You explain how an inference engine works, in short sentences and without any numbers. " * 12
QUESTIONS = ["What is prefix caching?", "What is a KV block?", "What does the scheduler do?"]


def main(args) -> None:
    prompts = [SHARED + question for question in QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=16)

    plain = LLM(model=args.model, gpu_memory_utilization=0.4, enable_prefix_caching=False)
    expected = [output.outputs[0].text for output in plain.generate(prompts, params)]
    del plain
    cleanup_dist_env_and_memory()

    llm = LLM(model=args.model, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    llm.generate(prompts[0], params)  # fills the cache
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    print(f"{len(outputs)} prompts in {time.perf_counter() - start:.3f} s")
    for output in outputs:
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were cached")
    print("same texts:", [output.outputs[0].text for output in outputs] == expected)
    print("reset:", llm.reset_prefix_cache())
    print("cached after it:", llm.generate(prompts[0], params)[0].num_cached_tokens)


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    main(parser.parse_args())
