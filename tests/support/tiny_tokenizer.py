# SPDX-License-Identifier: Apache-2.0
"""A tokenizer and a chat template like those that come with models, made here: byte-level BPE of a thousand tokens.

The template is a difficult one. It drops the reasoning of earlier turns, so that the text of a longer conversation does
not begin with that of the shorter one. It writes tools and tool calls as JSON, and it strips messages of white space.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024

BOS, EOS, PAD, START, END = "<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, START, END, "<tool_call>", "</tool_call>", "<think>", "</think>")

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- macro text_of(content) %}
    {%- if content is string %}{{- content | trim }}{%- elif content is not none and content is defined %}
        {%- for part in content %}{%- if part.type == 'text' %}{{- part.text | trim }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + text_of(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text_of(message.content) }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n' + text_of(message.content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Enough text for merges of whole words; the same text gives the same tokenizer.
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the engine keeps the blocks of a prompt in its cache.",
    "A router sends each request to the replica that already holds the longest prefix of the conversation.",
    "What is the weather in Paris today? It is sunny, twenty degrees, with a light wind from the west.",
    'You are a helpful assistant. {"type": "function", "function": {"name": "get_weather", "parameters": {}}}',
    "system user assistant tool messages and their contents, line after line\n\nwith numbers 0123456789 and signs !?.,:;",
    "Größe, naïve café, señor, Привет мир, 你好世界, こんにちは, emoji 🙂🚀",
)


def build_tokenizer() -> Tokenizer:
    """Train a byte-level BPE that puts `<bos>` before each text encoded with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def write_tokenizer(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder
