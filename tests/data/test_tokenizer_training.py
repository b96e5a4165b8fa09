import json

import pytest

from d3d_jax.data.chat import EMPTY_THINKING, encode_text, load_tokenizer
from d3d_jax.data.tokenizer_training import SPECIAL_TOKENS, train_tokenizer
from d3d_jax.errors import DataError

HARD = [
    "",
    " \t\r\n  x  \n\n",
    "12 dogs, 3.5%: $1,000 (½, x²)",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "e\u0301 is not \u00e9",
    "🦆👩🏽‍🚀 漢字 עברית \u0000\u2028",
    "it's I'll DON'T\u00a0<not a tag>",
]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("text", HARD)
def test_every_text_survives_encode_and_decode(tokenizer, text):
    assert tokenizer.decode(encode_text(tokenizer, text)) == text


def test_the_vocabulary_has_exactly_the_size_asked_for_and_the_special_tokens_first(tokenizer):
    assert len(tokenizer) == 320
    assert sorted(tokenizer.get_vocab().values()) == list(range(320))
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert [encode_text(tokenizer, token) for token in SPECIAL_TOKENS] == [[0], [1], [2], [3], [4]]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)


def test_digits_are_single_tokens(tokenizer):
    digits = {encode_text(tokenizer, str(digit))[0] for digit in range(10)}
    assert len(digits) == 10
    for text in ("48", "1999", "3.14159", "x2y22"):
        found = [token for token in encode_text(tokenizer, text) if token in digits]
        assert tokenizer.decode(found) == "".join(filter(str.isdigit, text))
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and any(map(str.isdigit, token))]


def test_the_frame_of_a_chat_is_a_few_tokens(tokenizer):
    assert len(encode_text(tokenizer, EMPTY_THINKING)) == 4
    assert len(encode_text(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")) == 5


def test_skipping_special_tokens_keeps_the_marks_of_thoughts(tokenizer):
    ids = encode_text(tokenizer, "<think>\nx\n</think>\n\ny<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\nx\n</think>\n\ny"


def test_the_same_texts_give_the_same_files(texts, tokenizer_folder, tmp_path):
    again = train_tokenizer(iter(texts), 320, tmp_path / "new" / "folder")
    names = sorted(path.name for path in again.iterdir())
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (again / name).read_bytes() == (tokenizer_folder / name).read_bytes()


def test_auto_tokenizer_gives_the_same_ids_also_next_to_a_qwen3_config(tokenizer, tokenizer_folder, tmp_path):
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    for place in (tokenizer_folder, folder):
        auto = AutoTokenizer.from_pretrained(str(place))
        assert [encode_text(auto, text) for text in HARD] == [encode_text(tokenizer, text) for text in HARD]
        assert encode_text(load_tokenizer(place), HARD[2]) == encode_text(tokenizer, HARD[2])


def test_a_vocabulary_that_the_texts_cannot_fill_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(DataError, match=r"only \d+ tokens; expected vocab_size 5000"):
        train_tokenizer(["a few words"], 5000, tmp_path / "out")
    with pytest.raises(DataError, match="at least 261"):
        train_tokenizer(["a few words"], 260, tmp_path / "out")
    with pytest.raises(DataError, match="no texts"):
        train_tokenizer([], 320, tmp_path / "out")
    assert not (tmp_path / "out").exists()


CHATS = {
    "one question": [user("hi")],
    "system": [{"role": "system", "content": 'Be <brief> & "good".'}, user("hi")],
    "the same question twice": [user("a"), answer("b"), user("a")],
    "a late system message": [user("a"), {"role": "system", "content": "s"}, user("b")],
    "thoughts of earlier answers": [user("a"), answer("<think>\nx\n</think>\n\nb"), user("c"), answer("d")],
    "thoughts apart": [user("a"), answer("b", reasoning_content="t\n")],
    "empty thoughts": [user("a"), answer("<think>\n\n</think>\n\nb")],
    "leading line breaks": [user("a"), answer("\n\nb")],
    "two answers in a row": [user("a"), answer("b", reasoning_content="q"), answer("c")],
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("opening", [False, True])
def test_the_template_renders_as_the_genuine_one(tokenizer, qwen, name, options, opening):
    ours, genuine = (
        each.apply_chat_template(CHATS[name], tokenize=False, add_generation_prompt=opening, **options)
        for each in (tokenizer, qwen)
    )
    assert ours == genuine
