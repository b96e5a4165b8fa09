"""Training rows as a tensorflow-datasets folder in array_record files: tokenised once, read at random, no TensorFlow.

The folder holds what tensorflow-datasets writes, readable by `tfds.builder_from_directory`, `d3d_dataset.json`, the
tokenizer's hash, the thinking mode and the report, and `d3d_sizes.npy`, length and prompt length of every row, so that
rows are packed without reading them. tensorflow-datasets and array-record are the extra `train`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from d3d_jax.checkpoints.atomic_folder import atomic_folder
from d3d_jax.data.chat import load_tokenizer, tokenizer_hash
from d3d_jax.data.documents import NO_TOP, Row, read_rows
from d3d_jax.data.packing import Document, Top
from d3d_jax.data.rows import Documents
from d3d_jax.errors import DataError

DESCRIPTION = "d3d_dataset.json"
SIZES = "d3d_sizes.npy"
SPLIT = "train"
LONG = "longer than max_tokens"


@dataclass
class DatasetReport:
    """What became of the turns that were read: `rows` and the sum of `dropped` add up to `read`.

    tokens and response_tokens: of the rows. truncated: rows whose response was cut by its budget; they are kept.
    lengths: rows by length in tokens, the key being the largest length counted there, a power of two. dropped: turns
    left out, by reason. examples: for each reason the first place where it was met.
    """

    read: int = 0
    rows: int = 0
    tokens: int = 0
    response_tokens: int = 0
    truncated: int = 0
    highest_id: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, where: str, reason: str) -> None:
        self.read += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.examples.setdefault(reason, where)

    def keep(self, row: Row) -> None:
        self.read += 1
        self.rows += 1
        self.tokens += len(row.ids)
        self.response_tokens += len(row.ids) - row.prompt_length
        self.truncated += not row.finished
        self.highest_id = max(self.highest_id, int(row.ids.max()))
        bound = 1 << (len(row.ids) - 1).bit_length()
        self.lengths[bound] = self.lengths.get(bound, 0) + 1

    def lines(self) -> list[str]:
        """The report for people."""
        mean = self.tokens / max(1, self.rows)
        said = [
            f"{self.read:,} turns read, {self.rows:,} rows kept ({self.truncated:,} cut by their budget)",
            f"{self.tokens:,} tokens, {self.response_tokens:,} of them responses; {mean:.0f} a row",
        ]
        most = max(self.lengths.values(), default=1)
        for bound, count in sorted(self.lengths.items()):
            said.append(f"  up to {bound:>7,} tokens  {count:>9,}  {'#' * -(-40 * count // most)}")
        for reason, count in self.dropped.items():
            said.append(f"  dropped {count:,}: {reason} (first: {self.examples[reason]})")
        return said


def build_dataset(
    inputs: Sequence[str | Path],
    folder: str | Path,
    tokenizer_folder: str | Path,
    *,
    enable_thinking: bool = False,
    max_tokens: int | None = None,
) -> DatasetReport:
    """Write the rows of JSONL files, in their order, as the dataset `folder`, which appears only when it is complete.

    Args:
        inputs: files as :func:`d3d_jax.data.documents.read_rows` takes them.
        tokenizer_folder: the target's tokenizer; text is encoded with it, ids must be below its size.
        max_tokens: longer rows are left out and counted.

    Raises:
        DataError: for input that cannot be used, when no row is left, or when what was written reads back otherwise.
        CheckpointError: for a folder that is not empty, or a tokenizer that cannot be read.
    """
    tfds = _tensorflow_datasets()
    tokenizer = load_tokenizer(tokenizer_folder)
    made_with = tokenizer_hash(tokenizer_folder)
    report, sizes = DatasetReport(), []
    first = next((row for path in inputs for row in read_rows(path, tokenizer, _unheeded, enable_thinking)), None)
    top = 0 if first is None or first.top is None else first.top.ids.shape[1]

    def examples() -> Iterator[tuple[int, dict[str, Any]]]:
        for path in inputs:
            for row in read_rows(path, tokenizer, report.drop, enable_thinking):
                highest = int(row.ids.max())
                if highest >= len(tokenizer):
                    raise DataError(
                        f"{path}: row {row.id!r} holds token id {highest}, but the tokenizer in {tokenizer_folder} has "
                        f"{len(tokenizer)}: the responses are those of another target"
                    )
                if max_tokens is not None and len(row.ids) > max_tokens:
                    report.drop(f"{path}: {row.id}", LONG)
                    continue
                width = 0 if row.top is None else row.top.ids.shape[1]
                if width != top:
                    raise DataError(
                        f"{path}: row {row.id!r} has {width} likeliest tokens a place, the first row {top}; "
                        "expected the same of all rows"
                    )
                report.keep(row)
                sizes.append((len(row.ids), row.prompt_length))
                stored = {
                    "id": row.id,
                    "ids": row.ids,
                    "prompt_length": np.int32(row.prompt_length),
                    "finished": row.finished,
                }
                if row.top is not None:
                    stored |= {"top_ids": row.top.ids, "top_logprobs": row.top.logprobs}
                yield report.rows - 1, stored
        if not report.rows:
            raise DataError(f"no row is left: {' '.join(report.lines())}")

    with atomic_folder(folder) as partial:
        builder = _builder_class(tfds, examples, top)(data_dir=str(partial / "work"), file_format="array_record")
        with contextlib.redirect_stdout(io.StringIO()):  # it tells of the partial folder as if it were to stay
            builder.download_and_prepare()
        made = Path(builder.data_dir)
        for path in made.iterdir():
            os.replace(path, partial / path.name)
        shutil.rmtree(partial / "work")
        description = {"tokenizer": made_with, "enable_thinking": enable_thinking, "report": asdict(report), "top": top}
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=2))
        np.save(partial / SIZES, np.asarray(sizes, np.int32))
        written, _ = read_dataset(partial)  # also asserts the number of rows
        found = np.array([(len(document.ids), document.prompt_length) for document in written])
        if not np.array_equal(found, written.sizes):
            raise DataError(f"{folder}: not every row reads back as it was written; try another disk")
    return report


def _unheeded(where: str, reason: str) -> None:
    """What is dropped is counted when the rows are written."""


def _builder_class(tfds: Any, examples: Callable[[], Iterator[tuple[int, dict[str, Any]]]], top: int) -> Any:
    """The builder of tensorflow-datasets, made here because its base class is there only with the extra.

    top: likeliest tokens stored for each response token; 0 for none.
    """

    class Documents(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # pyright: ignore
        """Token ids of a prompt and the response that a drafter is trained on."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {
                "id": tfds.features.Text(),
                "ids": tfds.features.Tensor(shape=(None,), dtype=np.int32),
                "prompt_length": tfds.features.Scalar(dtype=np.int32),
                "finished": tfds.features.Scalar(dtype=np.bool_),
            }
            if top:
                features["top_ids"] = tfds.features.Tensor(shape=(None, top), dtype=np.int32)
                features["top_logprobs"] = tfds.features.Tensor(shape=(None, top), dtype=np.float32)
            # In the order of the input: the loader shuffles by its own seed, and can be checked against the files.
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features), disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {SPLIT: self._generate_examples()}

        def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
            return examples()

    return Documents


def read_dataset(folder: str | Path, *, top: bool = False) -> tuple[Documents, int]:
    """The documents of a dataset folder in the order they were written, and the highest token id in them.

    top: with the target's likeliest tokens.

    Raises:
        DataError: for a folder that `d3d dataset` has not made, or that has lost rows, or has no likeliest tokens.
    """
    description = _description(folder)
    report = description["report"]
    if top and not description.get("top"):
        raise DataError(f"{folder}: {NO_TOP}")
    try:
        sizes = np.load(Path(folder) / SIZES)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no readable {SIZES}; build the dataset again") from error
    source = _tensorflow_datasets().builder_from_directory(str(folder)).as_data_source(SPLIT)
    if not len(source) == len(sizes) == report["rows"]:
        raise DataError(f"{folder} holds {len(source)} rows, but {report['rows']} were written; build it again")

    def read(index: int) -> Document:
        row = source[index]
        kept = Top(np.asarray(row["top_ids"]), np.asarray(row["top_logprobs"])) if top else None
        return Document(np.asarray(row["ids"], np.int32), int(row["prompt_length"]), kept)

    return Documents(sizes, read), report["highest_id"]


def dataset_tokenizer(folder: str | Path) -> str:
    """The hash of the tokenizer that a dataset folder was made with. Raises as :func:`read_dataset`."""
    return _description(folder)["tokenizer"]


def _description(folder: str | Path) -> dict[str, Any]:
    try:
        return json.loads((Path(folder) / DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no readable {DESCRIPTION}; expected a folder made by `d3d dataset`") from error


def _tensorflow_datasets() -> Any:
    try:
        import array_record.python.array_record_module  # noqa: F401  what tfds would miss much later
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise DataError(
            f"{error.name or error} is missing, which dataset folders need: pip install 'd3d-jax[train]'"
        ) from error
    tfds.disable_progress_bar()
    return tfds
