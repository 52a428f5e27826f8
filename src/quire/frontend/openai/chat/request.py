"""The path of a conversation of any route to the engine: plan, admit, render, submit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.frontend.admission import estimate_text_tokens
from quire.frontend.http.exchange import Exchange
from quire.frontend.new_request import ParsedPrompt
from quire.frontend.openai.chat.format import ChatFormat, ChatPlan
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.sampling import make_sampling_params
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.openai.submission import Submission
from quire.sampling_params import SamplingParams


@dataclass(frozen=True)
class PreparedChat:
    """Conversations ready for the engine. They share everything but their messages."""

    prompts: list[ParsedPrompt]
    params: SamplingParams
    plan: ChatPlan

    @property
    def prompt(self) -> ParsedPrompt:
        """The prompt of the only conversation."""
        (prompt,) = self.prompts
        return prompt


async def submit_chats(
    exchange: Exchange,
    bodies: Sequence[ChatBody],
    request_id: str,
    *,
    priority: int = 0,
    thinking_budget: int | None = None,
) -> tuple[PreparedChat, Submission]:
    """Hands conversations to the engine. All fields but `messages` are read from the first body.

    `thinking_budget` limits the model's reasoning, where it has one. Raises ValidationError, OverloadedError.
    """
    params, plan = await plan_chats(exchange, bodies)
    sizes = [estimate_text_tokens(texts_of(body.messages)) for body in bodies]
    with exchange.admit(sizes, params) as admitted:
        chat = await render_chats(exchange, bodies, params, plan, thinking_budget)
        return chat, await Submission.submit(exchange, admitted, chat.prompts, params, request_id, priority=priority)


async def plan_chats(exchange: Exchange, bodies: Sequence[ChatBody]) -> tuple[SamplingParams, ChatPlan]:
    """Returns the parameters and the plan that the conversations share. Raises ValidationError."""
    state, body = exchange.state, bodies[0]
    defaults = state.engine.model_config.sampling_defaults

    def plan() -> tuple[SamplingParams, ChatPlan]:
        params = make_sampling_params(body, defaults, max_tokens=body.output_limit, logprobs=body.num_logprobs)
        plan = state.part(ChatFormat).plan(body)
        plan.adjust(params)
        return params, plan

    params, chat_plan = await exchange.convert(plan)
    state.check_num_outputs(len(bodies) * params.n)
    return params, chat_plan


async def render_chats(
    exchange: Exchange,
    bodies: Sequence[ChatBody],
    params: SamplingParams,
    plan: ChatPlan,
    thinking_budget: int | None = None,
) -> PreparedChat:
    """Returns the conversations with their prompts, and adjusts `params` to them. Raises ValidationError."""
    renderer = exchange.state.part(PromptRenderer)
    prompts = await render_prompts(exchange, bodies, plan, params.max_tokens)
    texts = [prompt.text or "" for prompt in prompts]
    plan.limit_reasoning(params, texts, renderer.find_token, thinking_budget)
    plan = plan.place_form(params, texts, renderer.find_token)
    return PreparedChat(prompts, params, plan)


async def render_prompts(
    exchange: Exchange, bodies: Sequence[ChatBody], plan: ChatPlan, max_tokens: int | None = 0
) -> list[ParsedPrompt]:
    """Returns the prompts of conversations, through the model's chat template. Unless `max_tokens` is 0 they must leave
    room for so many tokens (None: for one)."""
    renderer, body = exchange.state.part(PromptRenderer), bodies[0]
    options = renderer.tokenization(body, max_tokens)
    salt = exchange.cache_salt(body.cache_salt)

    def render(each: ChatBody) -> ParsedPrompt:
        text = renderer.render_chat(
            each.messages,
            chat_template=each.chat_template,
            tools=plan.tools,
            documents=each.documents,
            add_generation_prompt=each.add_generation_prompt,
            continue_final_message=each.continue_final_message,
            variables=each.template_variables(),
        )
        return renderer.read_prompt(text, options, cache_salt=salt, max_tokens=max_tokens)

    return await exchange.convert(lambda: list(map(render, bodies)))


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the texts of a conversation, for a first estimate of its tokens."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                yield text
