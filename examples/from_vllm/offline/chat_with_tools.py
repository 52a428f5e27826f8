"""A model that calls a function, and answers with what the function returned."""

import json
import re

from vllm import LLM, EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str, unit: str = "C") -> str:
    return f"It is 21 degrees {unit} in {city}."


def main(args) -> None:
    llm = LLM(model=args.model, seed=args.seed, max_model_len=args.max_model_len)
    params = SamplingParams(max_tokens=128, temperature=0.0)
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]

    output = llm.chat(messages, sampling_params=params, tools=TOOLS)[0].outputs[0].text.strip()
    print("model:", output)
    calls = [json.loads(call) for call in re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", output, re.DOTALL)]

    messages.append({"role": "assistant", "content": output})
    for call in calls:
        result = {"get_weather": get_weather}[call["name"]](**call["arguments"])
        print("called:", call["name"], call["arguments"], "->", result)
        messages.append({"role": "tool", "content": result, "tool_call_id": call["name"]})
    final = llm.chat(messages, params, tools=TOOLS)
    print("answer:", final[0].outputs[0].text)


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="Qwen/Qwen3-0.6B")
    main(parser.parse_args())
