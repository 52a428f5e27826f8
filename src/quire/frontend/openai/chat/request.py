"""The way of every conversation to the engine, by whichever route it came: checks, room in the queue, prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.frontend.http.endpoint import RequestContext
from quire.frontend.http.state import ServerState
from quire.frontend.new_request import TokensPrompt
from quire.frontend.openai.chat.format import ChatFormat, ChatPlan
from quire.frontend.openai.protocol.chat import ChatBody
from quire.frontend.openai.protocol.sampling import make_sampling_params
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.openai.submission import check_admission
from quire.sampling_params import SamplingParams


@dataclass(frozen=True)
class PreparedChat:
    """Conversations ready for the engine. They share everything but their messages."""

    prompts: list[TokensPrompt]
    params: SamplingParams
    plan: ChatPlan

    @property
    def prompt(self) -> TokensPrompt:
        """The prompt of the only one."""
        (prompt,) = self.prompts
        return prompt


async def prepare_chats(
    context: RequestContext, bodies: Sequence[ChatBody], *, reserves: bool = True, thinking_budget: int | None = None
) -> PreparedChat:
    """Check the requests and render their prompts. Raises ValidationError, OverloadedError.

    All fields but `messages` are read of the first. With `reserves` their room in the queue is taken before any work.
    `thinking_budget` is a limit of the model's reasoning, where it has one.
    """
    state, body = context.state, bodies[0]
    params, plan = await context.work_on_body(lambda: _plan(state, body))
    state.check_num_outputs(len(bodies) * params.n)
    if reserves:
        check_admission(context, [sample_text(b.messages) for b in bodies], params.n, params.max_tokens)
    prompts: list[TokensPrompt] = []
    for conversation in bodies:
        if prompts:
            await asyncio.sleep(0)  # others may go on between two prompts
        prompt = await render_prompt(context, conversation, plan, params.max_tokens)
        state.part(PromptRenderer).check_room(len(prompt["prompt_token_ids"]), params.max_tokens)
        prompts.append(prompt)
    texts, find_token = [prompt.get("prompt") or "" for prompt in prompts], state.part(PromptRenderer).find_token
    plan.limit_reasoning(params, texts, find_token, thinking_budget)
    plan = plan.place_form(params, texts, find_token)
    return PreparedChat(prompts, params, plan)


def _plan(state: ServerState, body: ChatBody) -> tuple[SamplingParams, ChatPlan]:
    defaults = state.engine.model_config.sampling_defaults
    params = make_sampling_params(body, defaults, max_tokens=body.output_limit, logprobs=body.num_logprobs)
    plan = state.part(ChatFormat).plan(body)
    plan.adjust(params)
    return params, plan


async def render_prompt(
    context: RequestContext, body: ChatBody, plan: ChatPlan, max_tokens: int | None = None
) -> TokensPrompt:
    """The prompt of a conversation, through the model's chat template. `max_tokens` are to follow."""
    renderer = context.state.part(PromptRenderer)
    text = await renderer.render_chat(
        body.messages,
        chat_template=body.chat_template,
        tools=plan.tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.template_variables(),
    )
    options = {"add_special_tokens": body.add_special_tokens} | renderer.truncation(body, max_tokens)
    return await renderer.tokenize(text, options, cache_salt=context.cache_salt(body.cache_salt))


def sample_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Text about as long as the conversation's, for a first estimate of its tokens."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        found = [part.get("text") for part in parts if isinstance(part, Mapping)]
        texts += [text for text in found if isinstance(text, str)]
    return "".join(texts)
