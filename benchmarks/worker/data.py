"""Tokens for every contender: in every topology the same global batches.

In: a RunSpec. Out: each rank's inputs and targets of a step, from text, Megatron files or a random
generator. The batch of a step depends on ``(data.seed, step)`` only. Every rank draws the same
global batch and keeps the rows of its data-parallel index, so that all topologies train on the same
sequences. Launchers check the data with this module, so it imports torch only for tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import CHECKOUT
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import DataSpec, RunSpec
from zeropp.types.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAGIC = b"MMIDIDX\x00\x00"  # the first bytes of an index of Megatron's
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def open_megatron(prefix: Path) -> NDArray[Any]:
    """A memory map of all tokens of Megatron's indexed data set, ``PREFIX.idx`` and ``PREFIX.bin``.

    The index has (Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``): 9 magic bytes,
    version as uint64 = 1, one byte for the type of the tokens, the number of sequences and of
    documents as uint64, then the lengths (int32) and byte offsets (int64) of the sequences. The
    ``.bin`` has the tokens of all sequences one after another, so it is read as one stream. Raises
    ValueError if the index is not one of Megatron's.
    """
    index = prefix.with_name(prefix.name + ".idx")
    with index.open("rb") as file:
        header = file.read(len(MAGIC) + 9)
    if not header.startswith(MAGIC) or len(header) < len(MAGIC) + 9:
        raise ValueError(f"{index} is not a Megatron index (its first bytes are {header[:9]!r})")
    version, code = struct.unpack("<QB", header[len(MAGIC) :])
    if version != 1 or code not in DTYPES:
        raise ValueError(f"{index}: version {version}, token type {code} (known: version 1)")
    return np.memmap(prefix.with_name(prefix.name + ".bin"), dtype=DTYPES[code], mode="r")


_BYTES = 256  # vocabulary of byte-level text


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Draws batches of ``global_batch`` sequences of ``seq`` tokens.

    ``tokens`` is the stream from which sequences are cut; it is empty for synthetic data.
    """

    tokens: NDArray[Any]
    global_batch: int
    seq: int
    vocab: int
    seed: int

    def batch(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(inputs, targets) of one step, both int64 [global_batch, seq]; targets are the inputs
        shifted by one token. Raises ValueError for a token outside of the vocabulary."""
        random = np.random.default_rng([self.seed, step])
        if self.tokens.size == 0:
            shape = (self.global_batch, self.seq + 1)
            windows = random.integers(0, self.vocab, size=shape, dtype=np.int64)
        else:
            starts = random.integers(0, self.tokens.size - self.seq, size=self.global_batch)
            windows = self.tokens[starts[:, None] + np.arange(self.seq + 1)].astype(np.int64)
        if int(windows.max()) >= self.vocab:
            raise ValueError(
                f"token {int(windows.max())} of the data does not fit model.vocab={self.vocab}"
            )
        return windows[:, :-1], windows[:, 1:]

    def shard(
        self, step: int, index: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(inputs, targets) of data-parallel rank ``index`` of ``count``, both int64
        [global_batch / count, seq]."""
        rows = slice(*(i * self.global_batch // count for i in (index, index + 1)))
        inputs, targets = self.batch(step)
        return inputs[rows], targets[rows]


def open_batches(spec: RunSpec) -> BatchSource:
    """The batches of a spec; text and Megatron files are memory-mapped."""
    return BatchSource(
        tokens=_open_tokens(spec.data),
        global_batch=spec.global_batch,
        seq=spec.model.seq,
        vocab=spec.model.vocab,
        seed=spec.data.seed,
    )


def check_data(spec: RunSpec) -> None:
    """Raise SpecError if the data cannot be read or does not fit the model."""
    if spec.data.kind == "synthetic":
        return
    if not spec.data.path:
        raise SpecError(f"data.path='': data.kind={spec.data.kind} needs a file")
    if spec.data.kind == "text" and spec.model.vocab < _BYTES:
        raise SpecError(
            f"model.vocab={spec.model.vocab}: byte-level text needs at least {_BYTES} "
            "(or use data=synthetic)"
        )
    path = _resolve(spec.data.path)
    suffixes = (".bin", ".idx") if spec.data.kind == "megatron" else ("",)
    for suffix in suffixes:
        file = Path(f"{path}{suffix}")
        if not file.is_file():
            raise SpecError(f"data.path={spec.data.path!r}: no such file: {file}")
    try:
        length = _open_tokens(spec.data).size
    except ValueError as error:
        raise SpecError(f"data.path={spec.data.path!r}: {error}") from None
    if length <= spec.model.seq:
        raise SpecError(
            f"data.path={spec.data.path!r}: {length} tokens, but model.seq={spec.model.seq} "
            "needs at least one more than that"
        )


def _open_tokens(data: DataSpec) -> NDArray[Any]:
    if data.kind == "synthetic":
        return np.empty(0, dtype=np.uint8)
    path = _resolve(data.path)
    if data.kind == "megatron":
        return open_megatron(path)
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    return np.memmap(path, dtype=np.uint8, mode="r")


def _resolve(path: str) -> Path:
    """The path itself or, if a relative path is not found in the current folder, that path from the
    checkout."""
    given = Path(path).expanduser()
    return given if given.is_absolute() or given.exists() else CHECKOUT / given


def local_batch(
    batches: BatchSource, layout: Layout, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of this rank as tensors, both int64 [global_batch / dp, seq]."""
    import torch
    import torch.distributed as dist

    rows = batches.shard(step, layout.dp_index(dist.get_rank()), layout.dp)
    inputs, targets = (torch.from_numpy(part).to(device) for part in rows)
    return inputs, targets
