"""What README and docs show is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_of_the_readme_runs(capsys):
    [example] = examples("README.md")
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and any(" stop [" in line or " length [" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_examples_of_the_engine_run_one_after_the_other(capsys):
    names: dict = {}
    for example in examples("docs/engine.md"):
        exec(compile(example, "docs/engine.md", "exec"), names)
    said = capsys.readouterr().out
    assert names["seconds"] > 0 and "prompt 1" in said and "['stop', 'stop', 'cancelled']" in said
    assert "is \\['" in said  # the stream ended before its stop text
