"""`d3d train`: a run from its file, its flags, and the picture in the end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from d3d_jax.cli.main import main


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(64):
            ids = rng.integers(4, 20, 12).tolist()
            file.write(json.dumps({"id": str(number), "ids": ids, "prompt_length": 4}) + "\n")
    model = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    model |= {"num_attention_heads": 2, "num_key_value_heads": 2, "rope": {"theta": 1e4}}
    rows = str(tmp_path / "rows.jsonl")
    run = {"objective": "ar", "train_data": rows, "validation_data": rows, "output_dir": str(tmp_path / "out")}
    run |= {"steps": 4, "batch_size": 8, "row_length": 12, "log_every": 1, "validate_every": 2, "model": model}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path / "run.yaml"


def test_a_run_ends_with_its_figures_and_its_curves(run_file, capsys):
    picture = run_file.parent / "curves.png"
    assert main(["train", "--config", str(run_file), "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "step 2  validation_loss" in said and said.splitlines()[-1] == f"curves: {picture}"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(["curves", str(run_file.parent / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| out | 4 | ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--wandb-offline"], "are for wandb; set watch.wandb_project"),
        (["--plot", "curves.txt"], "--plot curves.txt: expected a name that ends in one of .png"),
        (["watch.tensorbord=true"], "unknown key 'watch.tensorbord' for WatchConfig; did you mean 'tensorboard'?"),
        (["loss.kd_weight=-1"], "'kd_weight': -1.0}: expected 0 or above"),
        (["loss.kd_weight=1"], "leave it out with objective 'ar'"),
        (["acceptance_every=0"], "acceptance_every=0: expected at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(run_file, capsys, flags, said):
    assert main(["train", "--config", str(run_file), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (run_file.parent / "out").exists()


def test_flags_of_watchers_are_settings_of_the_run(run_file, monkeypatch):
    from d3d_jax.training import loop

    seen = []
    monkeypatch.setattr(loop, "train", lambda config: seen.append(config) or {})
    flags = ["--tensorboard", "--wandb", "my drafters: 1", "--wandb-offline"]
    assert main(["train", "--config", str(run_file), *flags]) == 0
    watch = seen[0].watch
    assert (watch.tensorboard, watch.wandb_project, watch.wandb_mode) == (True, "my drafters: 1", "offline")
