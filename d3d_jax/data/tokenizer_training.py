"""A small byte-level BPE tokenizer with a ChatML template, for the demonstration models.

Every text survives encode and decode: all 256 bytes are in the vocabulary and nothing is normalised. Digits are single
tokens, so that a small model need not learn the arithmetic of digit groups.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from d3d_jax.data.chat import END_OF_TURN, END_THINK, THINK
from d3d_jax.data.prompts import load_conversations
from d3d_jax.errors import DataError

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, THINK, END_THINK)
_BYTES = 256

# Contractions, words with the space before them, single digits, punctuation with the line breaks after it, blank space.
_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# What a chat puts around the texts, between special tokens. Trained on as often as the texts themselves, so that
# each is one or two tokens.
_FRAME = ("system\n", "user\n", "assistant\n", "\n", "\n\n")

CHAT_TEMPLATE = """\
{#- ChatML. Thoughts of earlier answers are dropped; an answer to the last question shows its own, or empty ones. -#}
{%- set last = namespace(question=messages | length - 1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- set thoughts = message.reasoning_content or '' -%}
        {%- set answer = message.content -%}
        {%- if message.reasoning_content is not string and '</think>' in answer -%}
            {%- set thoughts = answer.split('</think>')[0].split('<think>')[-1] -%}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- set thoughts = thoughts.strip('\\n') -%}
        {%- if loop.index0 > last.question and (loop.last or thoughts) -%}
            {{- '<think>\\n' ~ thoughts ~ '\\n</think>\\n\\n' ~ answer.lstrip('\\n') -}}
        {%- else -%}
            {{- answer -}}
        {%- endif -%}
    {%- else -%}
        {{- message.content -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048, out_folder: str | Path = "tokenizer") -> Path:
    """Train on `texts` and write an HF folder with exactly `vocab_size` tokens, special ones included.

    Ids 0..4 are :data:`SPECIAL_TOKENS`, the next 256 the bytes, the rest merges in the order they were learnt.
    The folder holds tokenizer.json, tokenizer_config.json and chat_template.jinja; its end token is `<|im_end|>`,
    its padding `<|endoftext|>`. The same texts give the same files. Returns the folder.
    Raises DataError if `vocab_size` cannot hold the bytes, or the texts are too few to fill it; nothing is
    written then.
    """
    smallest = _BYTES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise DataError(f"vocab_size is {vocab_size}; expected at least {smallest}: all bytes and special tokens")
    texts = list(texts)
    if not texts:
        raise DataError("no texts to train a tokenizer on; expected at least one")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_frame(texts), trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise DataError(
            f"the texts give only {found} tokens; expected vocab_size {vocab_size}: add texts or lower vocab_size"
        )
    stored = json.loads(tokenizer.to_str())
    for token in stored["added_tokens"]:
        # As in Qwen3: thoughts are visible text, so decoding without special tokens keeps their marks.
        token["special"] = token["content"] not in (THINK, END_THINK)
    return _write_folder(Path(out_folder), stored)


def _with_frame(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield text
        yield from _FRAME


def _write_folder(folder: Path, stored: dict) -> Path:
    config = {
        "add_prefix_space": False,
        "additional_special_tokens": [START_OF_TURN],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": 1_000_000,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", stored), ("tokenizer_config.json", config)):
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


def main() -> None:
    """`python -m d3d_jax.data.tokenizer_training CONVERSATIONS.jsonl FOLDER [VOCAB_SIZE]`"""
    source, folder, *size = sys.argv[1:]
    texts = (m["content"] for row in load_conversations(source) for m in row.messages)
    print(train_tokenizer(texts, int(size[0]) if size else 2048, folder))


if __name__ == "__main__":
    main()
