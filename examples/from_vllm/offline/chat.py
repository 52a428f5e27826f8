"""Conversations through the model's chat template, or through one of a file."""

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def main(args: dict) -> None:
    template_path = args.pop("chat_template_path")
    template = None
    if template_path is not None:
        with open(template_path) as file:
            template = file.read()
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0.0, 48

    conversation = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is a KV block?"},
        {"role": "assistant", "content": "A KV block holds the keys and values of 16 tokens."},
        {"role": "user", "content": "What is prefix caching?"},
    ]
    (answer,) = llm.chat(conversation, params, use_tqdm=False, chat_template=template)
    print("one:", answer.outputs[0].text)

    answers = llm.chat([conversation] * 3, params, use_tqdm=True, chat_template=template)
    for answer in answers:
        print("of many:", answer.outputs[0].text)

    parts = [{"role": "user", "content": [{"type": "text", "text": "What is prefix caching?"}]}]
    (answer,) = llm.chat(parts, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    print("parts:", answer.outputs[0].text)


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="Qwen/Qwen3-0.6B")
    parser.add_argument("--chat-template-path", help="a Jinja file instead of the model's template")
    main(vars(parser.parse_args()))
