"""From chat messages to token ids, with the target's own tokenizer and template.

Text is rendered first and encoded second: `apply_chat_template(tokenize=True)` returns a list in transformers
4.57 and a dict in 5.x, whose length is the number of its keys. Rendering gives the same ids under both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d3d_jax.errors import CheckpointError, DataError

END_OF_TURN = "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
EMPTY_THINKING = "<think>\n\n</think>\n\n"

Message = Mapping[str, str]


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of an HF folder, from local files only.

    `tokenizer.json` is taken as it stands. AutoTokenizer would, for some classes in transformers 5.x, rebuild the
    pre-tokenizer from the class and so change the ids; it is used only for a folder without that file.
    Raises CheckpointError if the folder or its tokenizer is missing or broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected a local folder with tokenizer.json")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    fast = (folder / "tokenizer.json").is_file()
    if not fast and not (folder / "vocab.json").is_file():
        raise CheckpointError(
            f"{folder}: no tokenizer.json (nor vocab.json with merges.txt); copy the tokenizer files of the "
            "target model there"
        )
    loader = PreTrainedTokenizerFast if fast else AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise bare exceptions of many kinds here
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {error}; copy its files again") from error


def render_prompt(tokenizer: Any, messages: Sequence[Message], enable_thinking: bool = False) -> str:
    """The text that the model is to continue: `messages` in the template, then the assistant's opening.

    `messages` end with a user turn. Raises DataError if they do not, or if the tokenizer has no chat template.
    """
    _check_prompt(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the tokenizer has no chat template; put the target's chat_template.jinja in its folder")
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
    )


def encode_prompt(tokenizer: Any, messages: Sequence[Message], enable_thinking: bool = False) -> list[int]:
    """Token ids of :func:`render_prompt`'s text; nothing is added in front or behind."""
    return encode_text(tokenizer, render_prompt(tokenizer, messages, enable_thinking))


def encode_dialogue(
    tokenizer: Any, messages: Sequence[Message], enable_thinking: bool = False, finished: bool = True
) -> tuple[list[int], int]:
    """Token ids of prompt and response, and the prompt's length in tokens.

    `messages` end with the assistant's turn, which is the response. ``ids[:prompt_length]`` are exactly
    ``encode_prompt(tokenizer, messages[:-1], enable_thinking)``, and ``ids[prompt_length:]`` the response, encoded
    apart from it as a model would emit it, with `<|im_end|>` last. ``finished=False`` leaves that token out: for
    a response that was cut by its token budget.
    Raises DataError if the last turn is no assistant's, or holds thoughts although thinking is off.
    """
    if not messages or messages[-1].get("role") != "assistant":
        found = messages[-1].get("role") if messages else "no message"
        raise DataError(f"a dialogue ends with {found!r}; expected its last message to be the assistant's")
    prompt = encode_prompt(tokenizer, messages[:-1], enable_thinking)
    text = _response_text(tokenizer, messages, enable_thinking)
    response = encode_text(tokenizer, text) if text else []
    if finished:
        response.append(end_of_turn_id(tokenizer))
    return prompt + response, len(prompt)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as plain ints, without the special tokens that some tokenizers add on their own."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def end_of_turn_id(tokenizer: Any) -> int:
    """The id of `<|im_end|>`. Raises DataError if it is not one token of the vocabulary."""
    ids = encode_text(tokenizer, END_OF_TURN)
    if len(ids) != 1:
        raise DataError(f"{END_OF_TURN} encodes to {len(ids)} tokens; expected a ChatML tokenizer where it is one")
    return ids[0]


def tokenizer_hash(folder: str | Path) -> str:
    """A sha256 in hex of what decides the ids: (token, id) pairs, merges, added tokens and the chat template.

    Independent of the layout of the files, so that saving the same tokenizer again keeps it. Raises CheckpointError
    if there is no readable tokenizer.json.
    """
    folder = Path(folder)
    try:
        stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = stored["model"]["vocab"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in stored["model"].get("merges", [])]
        added = [(token["content"], token["id"]) for token in stored.get("added_tokens", [])]
        tokens = sorted({*vocabulary.items(), *added})
        content = json.dumps([tokens, merges, _template(folder)], ensure_ascii=True, separators=(",", ":"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: no readable BPE tokenizer.json ({type(error).__name__}: {error}); copy the target's"
        ) from error
    return hashlib.sha256(content.encode("ascii")).hexdigest()


def _template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return ""
    return json.loads(config.read_text(encoding="utf-8")).get("chat_template") or ""


def _check_prompt(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, Mapping)):
        raise DataError(f"messages are a {type(messages).__name__}; expected a list of {{'role', 'content'}}")
    if not messages or messages[-1].get("role") != "user":
        found = messages[-1].get("role") if messages else "no message"
        raise DataError(f"a prompt ends with {found!r}; expected its last message to be the user's")


def _response_text(tokenizer: Any, messages: Sequence[Message], enable_thinking: bool) -> str:
    """The assistant's text as the model would emit it after the prompt, without the end of turn."""
    text, thoughts = messages[-1]["content"], messages[-1].get("reasoning_content")
    if END_OF_TURN in text or END_OF_TURN in (thoughts or ""):
        raise DataError(f"an assistant's text holds {END_OF_TURN}; take it out, it is added behind the text")
    if not enable_thinking:
        # The prompt already ends with the empty thoughts, so they are no part of the response.
        text = text.removeprefix(EMPTY_THINKING)
        if (thoughts or "").strip() or THINK in text or END_THINK in text:
            raise DataError("a response holds thoughts, but thinking is off; use enable_thinking=True or drop them")
        return text
    if thoughts:
        return f"{THINK}\n{thoughts.strip(chr(10))}\n{END_THINK}\n\n{text}"
    if text.startswith(THINK):
        return text
    # A model that can think opens its answer with empty thoughts when it has none; others know no such frame.
    prompts = [render_prompt(tokenizer, messages[:-1], thinking) for thinking in (True, False)]
    return text if prompts[0] == prompts[1] else EMPTY_THINKING + text
