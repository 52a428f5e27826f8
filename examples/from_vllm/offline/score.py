"""Which of several documents answers a question."""

from dataclasses import asdict

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(args) -> None:
    llm = LLM(**asdict(EngineArgs.from_cli_args(args)))
    question = "What is prefix caching?"
    documents = ["Prefix caching reuses computed blocks.", "The weather in Paris is fine.", "Blocks hold 16 tokens."]
    outputs = llm.score(question, documents)
    for document, output in sorted(zip(documents, outputs), key=lambda pair: -pair[1].outputs.score):
        print(f"{output.outputs.score:.4f}  {document}")


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="BAAI/bge-reranker-v2-m3", runner="pooling", enforce_eager=True)
    main(parser.parse_args())
