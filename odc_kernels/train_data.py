"""Tokens of a plan's samples, and the microbatches a rank runs."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from odc_kernels.lm import PackedBatch, pack
from odc_sim.errors import InputError
from odc_sim.header import show, show_path
from odc_sim.plans import Plan

COLUMN = "input_ids"
SUFFIXES = (".jsonl", ".parquet")
TOKENS_STREAM = 7
"""Of the random streams of a seed (see odc_sim.inputs) the one for tokens."""

Tokens = npt.NDArray[np.int64]


class Samples(Protocol):
    """Where tokens come from."""

    def tokens(self, sample: int) -> torch.Tensor:
        """int64 [length of the sample in the plan]."""
        ...


class Synthetic:
    """Random tokens, the same for a sample whoever asks."""

    def __init__(self, lengths: Tokens, vocabulary: int, seed: int) -> None:
        self._lengths = lengths
        self._vocabulary = vocabulary
        self._seed = seed

    def tokens(self, sample: int) -> torch.Tensor:
        """int64 [length]."""
        rng = np.random.default_rng([self._seed, TOKENS_STREAM, sample])
        return torch.from_numpy(rng.integers(0, self._vocabulary, int(self._lengths[sample]), dtype=np.int64))


class Tokenized:
    """Rows of a data set. Each sample of the plan is a row of its length, in the order of the rows.

    A row is used again only when a length occurs more often in the plan than in the data.

    Raises:
        InputError: there is no row of a sample's length, or a token is not in the vocabulary.
    """

    def __init__(self, path: Path, lengths: Tokens, vocabulary: int) -> None:
        rows = [row for file in data_files(path) for row in _rows(file)]
        places: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            places.setdefault(row.size, []).append(number)
            if row.size and not 0 <= row.min() <= row.max() < vocabulary:
                worst = row.min() if row.min() < 0 else row.max()
                raise InputError(
                    f"{show_path(path)}: row {number} has token {worst}, expected 0 to {vocabulary - 1}, the model's "
                    "vocabulary"
                )
        used: dict[int, int] = {}
        self._rows: list[Tokens] = []
        for sample, length in enumerate(lengths.tolist()):
            found = places.get(length)
            if not found:
                raise InputError(
                    f"{show_path(path)}: no row of {length} tokens, as sample {sample} of the plan has; plan with the "
                    "lengths of this data (odc plan --lengths)"
                )
            self._rows.append(rows[found[used.get(length, 0) % len(found)]])
            used[length] = used.get(length, 0) + 1

    def tokens(self, sample: int) -> torch.Tensor:
        """int64 [length]."""
        return torch.from_numpy(self._rows[sample])


def microbatches(plan: Plan, samples: Samples, minibatch: int, rank: int) -> Iterator[PackedBatch]:
    """The microbatches of a rank in a minibatch, in order.

    Each sample of the minibatch counts the same in the mean over all ranks: FSDP2 divides gradients by the number of
    ranks, so each has the weight world_size / samples. An empty microbatch (padding) is one token that counts nothing.
    """
    weight = plan.world_size / minibatch_samples(plan, minibatch).size
    place = minibatch * plan.world_size + rank
    first, last = plan.rank_start[place], plan.rank_start[place + 1]
    for start, end in pairwise(plan.microbatch_start[first : last + 1].tolist()):
        ids = plan.sample_ids[start:end].tolist()
        yield pack([samples.tokens(sample) for sample in ids] or [torch.zeros(1, dtype=torch.int64)], weight)


def minibatch_samples(plan: Plan, minibatch: int) -> Tokens:
    """Ids of a minibatch's samples, on all ranks."""
    edges = plan.rank_start[[minibatch * plan.world_size, (minibatch + 1) * plan.world_size]]
    start, end = plan.microbatch_start[edges]
    return plan.sample_ids[start:end]


def data_files(path: Path) -> list[Path]:
    """The files of --data.

    Raises:
        InputError: there are none.
    """
    if not path.exists():
        raise InputError(f"--data {show_path(path)}: no such file or folder")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or files[0].suffix not in SUFFIXES:
        raise InputError(f"--data {show_path(path)}: expected {' or '.join(SUFFIXES)} with a column {COLUMN!r}")
    return files


def _rows(file: Path) -> Iterator[Tokens]:
    values = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
    for number, value in enumerate(values):
        try:
            row = np.asarray(value)
        except ValueError:  # a list of lists of several lengths
            row = np.array(None)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise InputError(f"{show_path(file)}: row {number}: {COLUMN} is {show(value)}, expected a list of integers")
        yield row.astype(np.int64)


def _parquet(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if COLUMN not in pq.read_schema(file).names:
            raise InputError(f"{show_path(file)}: no column {COLUMN!r}")
        table = pq.read_table(file, columns=[COLUMN])
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{show_path(file)}: cannot be read as Parquet: {reason}") from None
    for value in table.column(COLUMN):
        yield None if value.as_py() is None else value.values.to_numpy(zero_copy_only=False)


def _jsonl(file: Path) -> Iterator[Any]:
    try:
        # Not splitlines(): a JSON string may hold line ends of Unicode.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{show_path(file)}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InputError(f"{show_path(file)}: line {number} is not valid JSON: {error}") from None
        if not isinstance(fields, dict) or COLUMN not in fields:
            raise InputError(f"{show_path(file)}: line {number} has no field {COLUMN!r}")
        yield fields[COLUMN]
