"""Embeddings of texts."""

from argparse import Namespace
from dataclasses import asdict

from vllm import LLM, EngineArgs
from vllm.config import PoolerConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(args: Namespace) -> None:
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.pooler_config = PoolerConfig(pooling_type="MEAN", use_activation=True)
    llm = LLM(**asdict(engine_args))
    prompts = ["Prefix caching reuses blocks.", "Blocks are reused by prefix caching.", "The weather is fine."]
    outputs = llm.embed(prompts)
    vectors = [output.outputs.embedding for output in outputs]
    for prompt, vector in zip(prompts, vectors):
        print(f"{prompt!r}: {len(vector)} numbers, {[round(number, 3) for number in vector[:4]]}…")
    print("norm of the first:", round(sum(x * x for x in vectors[0]), 3))
    print("similarity:", *(round(sum(a * b for a, b in zip(vectors[0], v)), 3) for v in vectors[1:]))


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="intfloat/e5-small", runner="pooling", enforce_eager=True)
    main(parser.parse_args())
