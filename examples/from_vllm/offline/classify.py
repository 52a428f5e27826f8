"""The probability of each class."""

from dataclasses import asdict

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(args) -> None:
    llm = LLM(**asdict(EngineArgs.from_cli_args(args)))
    for prompt, output in zip(prompts := ["Hello!", "Prefix caching is wonderful."], llm.classify(prompts)):
        probs = output.outputs.probs
        print(f"{prompt!r}: class {probs.index(max(probs))} of {len(probs)}, {max(probs):.3f}")


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="cross-encoder/nli-MiniLM2-L6-H768", runner="pooling", enforce_eager=True)
    main(parser.parse_args())
