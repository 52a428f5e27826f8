"""Answers that have the form that was asked for: python examples/structured_output.py [MODEL]"""

import json
import sys

from quire import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(*sys.argv[1:])


def ask(prompt: str, **form: object) -> str:
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=StructuredOutputsParams(**form))
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].text


# JSON of a schema. The names of its properties are forced: they cost no step of the model.
schema = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["Dutch", "Maltese", "Welsh"]}, "maxItems": 2},
    },
    "required": ["first_name", "age", "languages"],
    "additionalProperties": False,
}
person = json.loads(ask("A person, as JSON:", json=schema))
print("person:", sorted(person), type(person["age"]).__name__)

# One of these, and a match of a regular expression.
print("choice:", ask("Is a block of the KV cache large or small?", choice=["large", "small"]))
print("regex:", ask("A date:", regex=r"20\d\d-(0[1-9]|1[0-2])-[0-2][1-8]"))

# Text whose parts have forms of their own: a call of a tool, in the words of a model that has never seen one.
call = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": {"enum": ["up", "down"]}},
    "end": "</call>",
}
print("tag:", ask("Which way?", structural_tag=json.dumps({"format": call})))
