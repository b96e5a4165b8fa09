import json
import shutil

import pytest

from d3d_jax.data.chat import (
    EMPTY_THINKING,
    encode_dialogue,
    encode_prompt,
    encode_text,
    end_of_turn_id,
    load_tokenizer,
    render_prompt,
    tokenizer_hash,
)
from d3d_jax.errors import CheckpointError, DataError

ASK = {"role": "user", "content": "How many clips?"}
SAY = {"role": "assistant", "content": "She sold 72 clips."}
THOUGHTS = "<think>\n48 + 24\n</think>\n\nShe sold 72 clips."


@pytest.fixture(params=["tokenizer", "qwen"])
def either(request):
    """Our own small tokenizer, and the genuine one where it is at hand."""
    return request.getfixturevalue(request.param)


def split(tokenizer, messages, **options) -> tuple[str, str]:
    ids, prompt_length = encode_dialogue(tokenizer, messages, **options)
    return tokenizer.decode(ids[:prompt_length]), tokenizer.decode(ids[prompt_length:])


def test_a_prompt_is_a_list_of_ints_that_decodes_to_the_rendered_text(either):
    ids = encode_prompt(either, [ASK])
    assert type(ids) is list and all(type(token) is int for token in ids)
    assert len(ids) > 10
    assert either.decode(ids) == render_prompt(either, [ASK])


def test_without_thinking_the_prompt_ends_in_empty_thoughts(either):
    opening = "<|im_start|>assistant\n"
    assert render_prompt(either, [ASK]).endswith(opening + EMPTY_THINKING)
    assert render_prompt(either, [ASK], enable_thinking=True).endswith(opening)


def test_the_dialogue_begins_with_exactly_the_ids_of_its_prompt(either):
    talks = [[ASK, SAY], [{"role": "system", "content": "Be brief.\n"}, ASK, SAY, ASK, SAY]]
    talks += [[ASK, {**SAY, "content": text}] for text in ("\n\nx", " x", "\n", "é", "8", "")]
    for messages in talks:
        for thinking in (False, True):
            prompt = encode_prompt(either, messages[:-1], thinking)
            ids, prompt_length = encode_dialogue(either, messages, thinking)
            assert prompt_length == len(prompt) and ids[:prompt_length] == prompt
            assert ids[-1] == end_of_turn_id(either) and len(ids) > prompt_length


def test_the_response_is_exactly_the_answer_and_its_end_of_turn(either):
    # No thoughts, empty thoughts, long thoughts; the last of two turns.
    assert split(either, [ASK, SAY, ASK, SAY])[1] == "She sold 72 clips.<|im_end|>"
    empty = {**SAY, "content": EMPTY_THINKING + SAY["content"]}
    assert split(either, [ASK, empty])[1] == "She sold 72 clips.<|im_end|>"
    thinking = [ASK, {**SAY, "content": THOUGHTS}]
    assert split(either, thinking, enable_thinking=True)[1] == THOUGHTS + "<|im_end|>"
    apart = [ASK, {**SAY, "reasoning_content": "\n48 + 24\n"}]
    assert split(either, apart, enable_thinking=True)[1] == THOUGHTS + "<|im_end|>"
    assert split(either, [ASK, SAY], enable_thinking=True)[1] == EMPTY_THINKING + "She sold 72 clips.<|im_end|>"


def test_the_dialogue_reads_as_the_template_renders_it(either):
    for thinking in (False, True):
        ids, _ = encode_dialogue(either, [ASK, SAY], thinking)
        assert either.decode(ids) + "\n" == either.apply_chat_template([ASK, SAY], tokenize=False)


def test_a_response_cut_by_its_budget_has_no_end_of_turn(either):
    whole, length = encode_dialogue(either, [ASK, SAY])
    assert encode_dialogue(either, [ASK, SAY], finished=False) == (whole[:-1], length)


@pytest.mark.parametrize("answer", [THOUGHTS, "x</think>", "x<|im_end|>"])
def test_thoughts_without_thinking_and_marks_inside_an_answer_are_refused(tokenizer, answer):
    with pytest.raises(DataError, match=r"thoughts|im_end"):
        encode_dialogue(tokenizer, [ASK, {**SAY, "content": answer}])


def test_messages_that_end_with_the_wrong_role_are_refused(tokenizer):
    with pytest.raises(DataError, match="'assistant'; expected its last message to be the user's"):
        encode_prompt(tokenizer, [ASK, SAY])
    with pytest.raises(DataError, match="'user'; expected its last message to be the assistant's"):
        encode_dialogue(tokenizer, [ASK])
    with pytest.raises(DataError, match="no message"):
        encode_prompt(tokenizer, [])
    with pytest.raises(DataError, match="str; expected a list"):
        encode_prompt(tokenizer, "How many?")


def test_a_tokenizer_without_template_is_refused(tokenizer_folder):
    bare = load_tokenizer(tokenizer_folder)
    bare.chat_template = None
    with pytest.raises(DataError, match=r"chat_template\.jinja"):
        render_prompt(bare, [ASK])


def test_a_missing_or_broken_tokenizer_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_hash(tmp_path)


def test_the_hash_survives_another_layout_and_notices_a_change(tokenizer, tokenizer_folder, tmp_path):
    known = tokenizer_hash(tokenizer_folder)
    tokenizer.save_pretrained(str(tmp_path / "again"))
    assert tokenizer_hash(tmp_path / "again") == known

    changed = shutil.copytree(tokenizer_folder, tmp_path / "changed")
    stored = json.loads((changed / "tokenizer.json").read_text())
    stored["model"]["merges"][-2:] = stored["model"]["merges"][:-3:-1]
    (changed / "tokenizer.json").write_text(json.dumps(stored))
    assert tokenizer_hash(changed) != known

    other = shutil.copytree(tokenizer_folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_hash(other) != known


def test_qwen_ids_are_those_of_the_published_vocabulary(qwen):
    assert len(qwen) == 151669
    assert encode_text(qwen, "<|im_start|>user\n") == [151644, 872, 198]
    assert encode_text(qwen, EMPTY_THINKING) == [151667, 271, 151668, 271]
