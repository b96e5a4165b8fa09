"""`d3d doctor` tells, and never falls over."""

from __future__ import annotations

import jax

from d3d_jax import demo
from d3d_jax.cli import doctor
from d3d_jax.cli.main import main


def test_a_memory_plan_needs_only_the_configs(own_pair, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "report_demo", lambda: True)
    for folder in (own_pair.target, own_pair.drafter):
        (folder / "model.safetensors").unlink()
    code = main(["doctor", "--model-path", str(own_pair.target), "--draft-model-path", str(own_pair.drafter)])
    printed = capsys.readouterr().out
    assert code == 0 and "all well" in printed
    assert "target" in printed and "drafter" in printed and "4096 slots" in printed and "blocks of 4" in printed
    assert "8 x cpu" in printed and "no accelerator" in printed


def test_a_broken_installation_is_told_and_is_exit_code_1(monkeypatch, tmp_path, capsys):
    def broken(*args):
        raise RuntimeError("driver\n mismatch")

    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setattr(demo, "_FOLDER", tmp_path)
    monkeypatch.setattr(doctor, "NEEDED", (*doctor.NEEDED, "no-such-library"))
    monkeypatch.setattr(doctor, "requirements", lambda: {"jax": ">=99", "no-such-library": ">=2"})
    assert main(["doctor", "--model-path", str(tmp_path)]) == 1
    told = [line.split("!!", 1)[1].strip() for line in capsys.readouterr().out.splitlines() if "!!" in line]
    assert any("RuntimeError: driver mismatch" in line for line in told)
    assert any("pip install 'no-such-library>=2'" in line for line in told)
    assert any("pip install 'jax>=99'" in line for line in told)
    assert any("came without the embedded pair" in line for line in told)
    assert any("config.json does not exist" in line for line in told)
