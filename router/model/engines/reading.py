# SPDX-License-Identifier: Apache-2.0
"""How an engine reads chats and messages of Anthropic's API before its template writes them. Pure facts.

Each field is one difference between the engines, so that one reader serves them all.
"""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """The facts in which engines differ when they turn a message into a chat, and a chat into a template's values."""

    # The name of the engine that reads in this way.
    name: str

    # Messages of Anthropic's API.

    # The separator between the texts of a system prompt.
    system_separator: str
    # Whether Claude Code's attribution, which differs in each request, is left out of system prompts.
    drops_attribution: bool
    # Whether a text block without text stays in its message.
    keeps_empty_texts: bool
    # Whether a text before a tool's result stays before it; otherwise it follows all results.
    keeps_block_order: bool
    # The separator between the texts of a tool's result, or None if the result keeps them as parts.
    result_separator: str | None
    # Whether each tool of the chat has a description and `strict`, also where the message's tool has none.
    completes_tools: bool
    # Whether a message's tool choice narrows the tools; otherwise only "none" has an effect.
    applies_tool_choice: bool
    # Whether the message's own `chat_template_kwargs` reach the template.
    takes_template_arguments: bool
    # Whether `thinking` and `output_config.effort` become arguments of the template, and earlier thinking is written as
    # the engine's reasoning parser says; trials find these arguments and forms.
    takes_thinking: bool

    # Responses.

    # Whether a body of `/v1/responses` becomes the chat that `responses_conversation.py` makes of it.
    converts_responses: bool

    # Chats.

    # The separator between the parts of a content that is passed to the template as one text.
    part_separator: str
    # Whether a content that is one text stays one, also for a template that loops over parts.
    keeps_texts: bool
    # Whether tools and tool calls have their keys in the client's order and with the empty fields of the engine's types.
    completes_calls: bool
    # Whether the template gets an answer's reasoning as `reasoning`, too, and the chat may have it under that name.
    names_reasoning: bool
    # Whether a last message of the assistant, if it is not to be continued, is passed on as the user's.
    turns_last_answer: bool
    # Whether tools are left out of the prompt with tool_choice "none", and all but one with a choice that names it.
    drops_unused_tools: bool


# Source: vLLM 0.19.1 to 0.33.0 entrypoints/anthropic/serving.py, entrypoints/openai/responses/utils.py,
# renderers/chat_utils.py.
VLLM_READING = Reading(
    name="vllm",
    system_separator="",
    drops_attribution=True,
    keeps_empty_texts=False,
    keeps_block_order=False,
    result_separator="\n",
    completes_tools=False,
    applies_tool_choice=False,
    takes_template_arguments=True,
    takes_thinking=False,
    converts_responses=True,
    part_separator="\n",
    keeps_texts=False,
    completes_calls=False,
    names_reasoning=True,
    turns_last_answer=False,
    drops_unused_tools=False,
)

# Source: SGLang 0.5.23 entrypoints/anthropic/serving.py, entrypoints/openai/serving_chat.py (_process_messages),
# parser/jinja_template_utils.py (process_content_for_template_format).
SGLANG_READING = Reading(
    name="sglang",
    system_separator="\n",
    drops_attribution=False,
    keeps_empty_texts=True,
    keeps_block_order=True,
    result_separator=None,
    completes_tools=True,
    applies_tool_choice=True,
    takes_template_arguments=False,
    takes_thinking=True,
    converts_responses=False,
    part_separator=" ",
    keeps_texts=True,
    completes_calls=True,
    names_reasoning=False,
    turns_last_answer=True,
    drops_unused_tools=True,
)
