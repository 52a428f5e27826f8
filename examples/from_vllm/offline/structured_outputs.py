"""Answers that must be one of a list, match a regular expression, a JSON schema or a grammar."""

from dataclasses import asdict
from enum import Enum

from pydantic import BaseModel, Field
from vllm import LLM, EngineArgs, SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


class Size(str, Enum):
    small = "small"
    large = "large"


class Block(BaseModel):
    name: str = Field(max_length=12)
    tokens: int = Field(ge=1, le=64)
    size: Size


GRAMMAR = """
root ::= "SELECT " column " FROM " table
column ::= "id" | "name"
table ::= "users" | "orders"
"""

CASES = {
    "choice": ("Is prefix caching good or bad?", StructuredOutputsParams(choice=["good", "bad"])),
    "regex": ("Write an e-mail address.", StructuredOutputsParams(regex=r"[a-z]{3,8}@[a-z]{3,8}\.com")),
    "json": ("Describe a KV block in JSON.", StructuredOutputsParams(json=Block.model_json_schema())),
    "grammar": ("Write an SQL query.", StructuredOutputsParams(grammar=GRAMMAR)),
}


def main(args) -> None:
    llm = LLM(
        **asdict(EngineArgs.from_cli_args(args)), structured_outputs_config=StructuredOutputsConfig(backend="auto")
    )
    params = [SamplingParams(structured_outputs=form, max_tokens=80, temperature=0) for _, form in CASES.values()]
    outputs = llm.generate([prompt for prompt, _ in CASES.values()], params)
    for kind, output in zip(CASES, outputs):
        text = output.outputs[0].text
        print(f"{kind}: {Block.model_validate_json(text) if kind == 'json' else text}")


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="Qwen/Qwen3-0.6B")
    main(parser.parse_args())
