"""A good row of a published table as text, for the tests of validation."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.validation.predict import Prediction, predict
from benchmarks.validation.rows import COLUMNS, Line, PublishedRow, read_rows

CELLS = dict.fromkeys(COLUMNS, "") | {
    "source": "a test", "url": "none", "table": "1", "verified": "yes", "role": "held_out",
    "program": "megatron_lm_2022", "model": "GPT 1.3B", "params_b": "1.3", "family": "gpt",
    "gated_mlp": "no", "layers": "24", "hidden": "2048", "heads": "16", "kv_heads": "16",
    "ffn": "8192", "vocab": "51200", "seq": "2048", "tied_embeddings": "yes", "device": "a100",
    "memory_gib": "80", "num_gpus": "8", "tp": "1", "pp": "4", "chunks": "1", "dp": "2", "cp": "1",
    "ep": "1", "sequence_parallel": "no", "zero": "0", "schedule": "1f1b", "micro_batch": "2",
    "global_batch": "64", "recompute": "none", "dtype": "bf16", "offload": "none",
    "metric": "step_time", "value": "1.5", "unit": "s",
}  # fmt: skip
LARGE = {
    "model": "GPT-3 175B", "params_b": "", "hidden": "12288", "layers": "96", "heads": "96",
    "kv_heads": "96", "ffn": "49152",
}  # fmt: skip


def write_table(folder: Path, *rows: dict[str, str], name: str = "table.csv") -> Path:
    """A CSV file of such rows; its header is that of the first."""
    path = folder / name
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def line_of(folder: Path, **changes: str) -> Line:
    """The good row with other cells, as the reader gives it."""
    (line,) = read_rows(write_table(folder, CELLS | changes))
    return line


def row(**changes: str) -> PublishedRow:
    """The good row with other cells; raises pydantic's ValidationError where it is refused."""
    return PublishedRow.model_validate({k: v for k, v in (CELLS | changes).items() if v})


def predicted(**changes: str) -> Prediction:
    """The prediction of such a row."""
    return predict(row(**changes))
