"""The parameter tree in an orbax folder.

Orbax restores a leaf of another shape by cutting or filling it without a word, so names and shapes are checked
against the model first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from d3d_jax.checkpoints.ledger import check_tree, flatten, nest
from d3d_jax.config import ModelConfig
from d3d_jax.errors import CheckpointError

PARAMS_FOLDER = "params"
"""Where a converted model folder holds its orbax tree, beside config.json."""


def is_orbax(folder: str | Path) -> bool:
    """Whether `folder` is a model folder with an orbax tree."""
    return (Path(folder) / PARAMS_FOLDER / "_METADATA").is_file()


def save_tree(folder: str | Path, params: Mapping[str, Any]) -> None:
    """Write the stacked tree `params` as the orbax folder `folder`, which must not exist yet."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder).absolute(), dict(params))


def restore_tree(folder: str | Path, config: ModelConfig, *, under: str | None = None) -> dict[str, Any]:
    """Read the parameters of `config` from the orbax folder `folder` into numpy arrays on the host.

    Args:
        under: the key of the saved tree that holds the parameters, such as "params"; the tree itself when None.
            Whatever else is saved (optimiser state) is not read.

    Raises:
        CheckpointError: when there is no such orbax tree, or with every leaf that is missing, left over or of
            another shape.
    """
    path = Path(folder).absolute()
    if not (path / "_METADATA").is_file():
        raise CheckpointError(f"{path} is no complete orbax checkpoint: it has no _METADATA")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saved: Any = checkpointer.metadata(path).item_metadata.tree
        if under is not None and under not in saved:
            raise CheckpointError(f"{path} holds {', '.join(saved)}; expected {under!r} among them")
        saved = saved if under is None else saved[under]
        flat = flatten(saved)
        check_tree({route: leaf.shape for route, leaf in flat.items()}, config, str(path))
        wanted = nest({route: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for route, leaf in flat.items()})
        item = wanted if under is None else {under: wanted}
        arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype), item)
        restored = checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
        )
    return restored if under is None else restored[under]
