"""Every flag of the engine on the command line of one's own program, beside flags for sampling."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def make_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(description="Generate with any engine setting")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="Qwen/Qwen3-0.6B")
    sampling = parser.add_argument_group("Sampling")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    return parser


def main(args: dict) -> None:
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    for output in llm.generate(["What is a KV block?", "Paged attention"], params):
        print("prompt:", output.prompt)
        print("text:", output.outputs[0].text)
        print("tokens:", len(output.outputs[0].token_ids))


if __name__ == "__main__":
    main(vars(make_parser().parse_args()))
