"""Reads Megatron's indexed data set: ``PREFIX.idx`` (header) and ``PREFIX.bin`` (tokens).

Layout of the index (Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``): 9 magic bytes,
version as uint64 = 1, one byte for the type of the tokens, the number of sequences and of
documents as uint64, then the lengths (int32) and byte offsets (int64) of the sequences. The
``.bin`` has the tokens of all sequences one after another, so it is read as one stream.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


def open_megatron(prefix: Path) -> NDArray[Any]:
    """A memory map of all tokens; raises ValueError if the index is not one of Megatron's."""
    index = prefix.with_name(prefix.name + ".idx")
    with index.open("rb") as file:
        header = file.read(len(MAGIC) + 9)
    if not header.startswith(MAGIC) or len(header) < len(MAGIC) + 9:
        raise ValueError(f"{index} is not a Megatron index (its first bytes are {header[:9]!r})")
    version, code = struct.unpack("<QB", header[len(MAGIC) :])
    if version != 1 or code not in DTYPES:
        raise ValueError(f"{index}: version {version}, token type {code} (known: version 1)")
    return np.memmap(prefix.with_name(prefix.name + ".bin"), dtype=DTYPES[code], mode="r")
