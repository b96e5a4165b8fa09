"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_of_the_readme_runs(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and any(" stop [" in line or " length [" in line for line in lines)
