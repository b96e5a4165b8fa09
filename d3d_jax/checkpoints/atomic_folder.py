"""A folder that appears under its name only when everything in it has been written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from d3d_jax.errors import CheckpointError


def check_destination(folder: str | Path, *, overwrite: bool = False) -> Path:
    """`folder` as a resolved path that may be written.

    Raises:
        CheckpointError: when it is a file, or a folder with content and either `overwrite` is off or the
            content is no model, which no flag deletes.
    """
    path = Path(folder).resolve()
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{path} is not empty; name another folder, or say overwrite")
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is not empty and holds no config.json, so it is no model to overwrite")
    return path


@contextmanager
def atomic_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a new folder beside `folder`, and rename it to `folder` when the block ends without an error.

    After an error nothing is left and what stood under `folder` before stands there still.

    Raises:
        CheckpointError: before anything is written; see :func:`check_destination`.
    """
    final = check_destination(folder, overwrite=overwrite)
    final.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    try:
        partial = work / "new"
        partial.mkdir()
        yield partial
        if final.exists():
            final.rename(work / "old")
        try:
            os.replace(partial, final)
        except OSError:
            if (work / "old").exists():
                (work / "old").rename(final)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
