"""The command itself: light to start, one line for a mistake, and its exit codes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from d3d_jax import __version__
from d3d_jax.cli import main as d3d
from d3d_jax.errors import CapacityError


@pytest.mark.parametrize("name", d3d.COMMANDS)
def test_every_command_has_help_that_ends_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        d3d.main([name, "--help"])
    assert leaving.value.code == 0
    end = capsys.readouterr().out.rpartition("example")[2]
    assert f"d3d {name}" in end


def test_every_command_module_is_registered():
    folder = Path(d3d.__file__).parent
    names = {path.stem for path in folder.glob("*.py") if "\ndef add_arguments(" in path.read_text()}
    assert names == set(d3d.COMMANDS)
    assert all(name == importlib.import_module(f"d3d_jax.cli.{name}").NAME for name in names)


def test_version_and_bare_command(capsys):
    with pytest.raises(SystemExit):
        d3d.main(["--version"])
    assert __version__ in capsys.readouterr().out
    assert d3d.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "COMMAND" in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dmeo"], "unknown command 'dmeo'; did you mean 'demo'?"),
        (["demo", "--num-prompt", "3"], "unrecognized arguments: --num-prompt"),
        (["demo", "--num-prompts", "0"], "'0' is not a whole number above 0"),
        (["generate"], "--prompt --input is required"),
    ],
)
def test_what_cannot_be_parsed_is_one_line(words, said, capsys):
    assert d3d.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and said in printed.err
    assert printed.err.count("\n") == 1


def test_errors_and_interruptions_have_their_exit_codes(monkeypatch, capsys):
    def fail(error: BaseException):
        def run(args):
            raise error

        monkeypatch.setattr("d3d_jax.cli.doctor.run", run)
        return d3d.main(["doctor"])

    assert fail(CapacityError("two\n  lines")) == 2
    assert capsys.readouterr().err == "error: two lines\n"
    assert fail(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):  # a fault of ours is shown in full
        fail(ZeroDivisionError())


def test_the_process_is_as_light_and_terse():
    """Help without JAX; a mistake is one line on stderr, nothing on stdout, exit code 2."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    code = "import sys; from d3d_jax.cli.main import build_parser; build_parser(); print('jax' in sys.modules)"
    light = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert light.stdout == "False\n", light.stderr
    words = [sys.executable, "-m", "d3d_jax.cli", "demo", "--device", "tpu"]
    refused = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("error: no tpu device is there: JAX found 8 cpu")
    assert refused.stderr.count("\n") == 1
