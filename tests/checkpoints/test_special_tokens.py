from __future__ import annotations

import json
import logging

import pytest

from d3d_jax.checkpoints.special_tokens import check_mask_id, read_eos_ids
from d3d_jax.errors import ConfigError


def test_the_published_mask_id_is_accepted_without_resizing():
    check_mask_id(151669, 151936, (151645, 151643), (151643,))
    with pytest.raises(ConfigError, match="padding"):
        check_mask_id(151643, 151936, (151645,), (151643,))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, 5, (5,)),
        (2, [5, 2, 5], (5, 2)),
        (2, ..., (2,)),
        (None, [5], (5,)),
        (None, None, ()),
    ],
)
def test_the_generation_config_decides_the_ends_and_lists_count_whole(config_folder, config, generation, expected):
    folder = config_folder(eos_token_id=config)
    if generation is not None:
        values = {} if generation is ... else {"eos_token_id": generation}
        (folder / "generation_config.json").write_text(json.dumps(values))
    assert read_eos_ids(folder) == expected


def test_an_end_that_is_no_id_is_refused(config_folder):
    with pytest.raises(ConfigError, match="eos_token_id='</s>'"):
        read_eos_ids(config_folder(eos_token_id="</s>"))


def test_a_tokenizer_that_ends_otherwise_is_warned_about(config_folder, caplog: pytest.LogCaptureFixture):
    folder = config_folder()
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<|im_end|>"}]}')
    with caplog.at_level(logging.WARNING):
        assert read_eos_ids(folder) == (2,)
    assert "id 9" in caplog.text and "[2]" in caplog.text


def test_a_folder_that_names_no_end_ends_where_its_tokenizer_does(config_folder):
    folder = config_folder(eos_token_id=None)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<|im_end|>"}]}')
    assert read_eos_ids(folder) == (9,)
