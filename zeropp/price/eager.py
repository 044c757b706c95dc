"""What blocks of public model code run where nothing fuses their operators.

``conf/eager_kernels.csv`` has a row for a pass of a block, or of the norm before the head, of one
model's code at one precision. 399addb4 made it with ``benchmarks/evidence/eager_kernels.py``,
from a trace of the code of ``transformers`` and of this suite.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from typing import Any

from zeropp.types.data import DATA
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape

TABLE = DATA / "conf" / "eager_kernels.csv"


@dataclass(frozen=True, kw_only=True)
class EagerPass:
    """What one pass runs beside products and attention.

    ``kernels``: those that compute or copy, each of one operator; ``launches``: the operators that
    the host starts, products and attention among them; a view counts half. ``hidden``,
    ``keys`` and ``ffn``: bytes moved per token and unit of the hidden state's width, of the width
    of keys (or values) and of the MLP's. Of the pass ``saved`` they are bytes that the forward
    keeps for the backward, products and attention among them.
    """

    code: str
    precision: Precision
    part: str
    name: str
    kernels: int
    launches: float
    hidden: float
    keys: float
    ffn: float

    def moved(self, shape: ModelShape) -> float:
        """Bytes per token. A query moves as much as a key, so heads whose widths do not add up to
        the hidden state's count as more keys, or fewer."""
        keys = shape.kv_heads * shape.head_dim + shape.attended - shape.hidden
        return self.hidden * shape.hidden + self.keys * keys + self.ffn * shape.ffn


def eager_pass(
    code: str, shape: ModelShape, precision: Precision, name: str, part: str = "block"
) -> EagerPass:
    """A pass (``forward``, ``backward``, ``saved``) of the code ``code``, by which a shape's family
    is run: of ``huggingface`` and ``suite`` by that family's. Raises KeyError for a code that is
    not in the table."""
    families = {"huggingface": {"llama": "llama", "gpt": "gpt_neox"}}
    families["suite"] = {"llama": "suite llama", "gpt": "suite gpt"}
    half: Precision = "fp32" if precision == "fp32" else "bf16"
    return passes()[families.get(code, {}).get(shape.family, code), half, part, name]


@cache
def passes() -> dict[tuple[str, Precision, str, str], EagerPass]:
    """All rows, by code, precision, part and name."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    kinds = {"kernels": int, "launches": float, "hidden": float, "keys": float, "ffn": float}
    passes = [EagerPass(**row | {k: kind(row[k]) for k, kind in kinds.items()}) for row in rows]
    return {(row.code, row.precision, row.part, row.name): row for row in passes}
