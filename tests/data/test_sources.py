"""Files of one run: all their documents, in the order in which they are named."""

from __future__ import annotations

import json

import pytest

from d3d_jax.data.sources import load_documents
from d3d_jax.errors import DataError


def test_files_come_one_after_the_other_and_may_share_ids(tmp_path):
    for name, first in (("greedy", 1), ("sampled", 5)):
        rows = [{"id": f"q{n}", "ids": [first + n, 9, 2], "prompt_length": 1} for n in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [tmp_path / "greedy.jsonl", tmp_path / "sampled.jsonl"]
    assert [int(document.ids[0]) for document in load_documents(both, None, 10)] == [1, 2, 3, 5, 6, 7]
    assert [int(document.ids[0]) for document in load_documents(both[::-1], None, 10)] == [5, 6, 7, 1, 2, 3]
    with pytest.raises(DataError, match=r"sampled.jsonl holds token id 9, but the model has 9 rows"):
        load_documents(both[1:], None, 9)
