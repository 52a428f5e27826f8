"""The engine's own loop: requests are added while others run."""

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser

REQUESTS = [
    ("A KV block is", SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, prompt_logprobs=1)),
    ("The scheduler", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=12)),
    ("Prefix caching", SamplingParams(n=2, temperature=0.8, max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)),
    ("Preemption means", SamplingParams(min_tokens=4, max_tokens=12, stop=["."], include_stop_str_in_output=True)),
]


def main(args) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    waiting, request_id = list(REQUESTS), 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                print(f"request {output.request_id}: {[each.text for each in output.outputs]}")


if __name__ == "__main__":
    main(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
