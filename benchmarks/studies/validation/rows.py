"""Rows of published tables, and the rules that fill what a source left blank.

Fed by CSV files of the one schema (``results/published/README.md``). No rule reads a row's
measured value. A row that cannot be understood raises ``UnpredictableError`` with the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.specification.run_spec import SpecError
from zeropp.shape import Family, ModelShape

Row = Mapping[str, str]

NEEDED = ("metric", "value", "n_gpus")  # columns of every table of training measurements


class UnpredictableError(ValueError):
    """Why a row has no prediction; one line."""


@dataclass(frozen=True)
class KnownShape:
    """Sizes that a source names but does not print."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False


# Llama sizes: arXiv 2302.13971 (table 2), 2307.09288, 2407.21783 (table 3). The four with
# 131,072 tokens are nanotron's, worked out from its parameter counts: Llama 3's blocks with as
# many key/value heads as heads.
KNOWN_SHAPES: Mapping[str, KnownShape] = {
    "llama 7b": KnownShape("llama", 4096, 32, 32, 32, 11008, 32000),
    "llama 13b": KnownShape("llama", 5120, 40, 40, 40, 13824, 32000),
    "llama 30b": KnownShape("llama", 6656, 60, 52, 52, 17920, 32000),
    "llama 65b": KnownShape("llama", 8192, 80, 64, 64, 22016, 32000),
    "llama 2 70b": KnownShape("llama", 8192, 80, 64, 8, 28672, 32000),
    "llama 70b": KnownShape("llama", 8192, 80, 64, 8, 28672, 128256),
    "llama 8b": KnownShape("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama 405b": KnownShape("llama", 16384, 126, 128, 8, 53248, 128256),
    "1.34b": KnownShape("llama", 2048, 16, 32, 32, 8192, 131072, tied=True),
    "3.57b": KnownShape("llama", 3072, 28, 24, 24, 8192, 131072, tied=True),
    "8.86b": KnownShape("llama", 4096, 32, 32, 32, 14336, 131072),
    "80b": KnownShape("llama", 8192, 80, 64, 64, 28672, 131072),
}
_GATED = ("llama", "mistral", "internlm", "qwen", "baichuan", "yi ")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a file; missing cells become empty. Files of other tables give no rows. Raises
    SpecError where it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise SpecError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    return [
        {k: v if isinstance(v, str) else "" for k, v in row.items() if k is not None}
        for row in rows
        if all(name in row for name in NEEDED)
    ]


def number(row: Row, field: str) -> int | None:
    """A whole number; blank is None. ``8k`` is 8,192 of a sequence and 8,000 else, ``48 x 8`` the
    product. Raises UnpredictableError where there is text instead."""
    text = row.get(field, "").strip().lower().replace(",", "")
    if not text or text in ("n/a", "na", "-", "none", "null", "not stated"):
        return None
    product = re.fullmatch(r"(\d+)\s*[x×*]\s*(\d+)", text)
    if product:
        return int(product[1]) * int(product[2])
    match = re.match(r"([-+]?\d+(?:\.\d+)?)\s*([km]\b)?", text)
    if not match:
        raise UnpredictableError(f"{field}={text!r} is not a number")
    thousand = 1024 if field == "seq" else 1000
    return int(float(match[1]) * {"k": thousand, "m": thousand**2, None: 1}[match[2]])


def shape_of(row: Row) -> ModelShape:
    """The model. Blank sizes: a known model of that name; else GPT-3's proportions (ffn 4 hidden,
    heads of 128), 50,304 tokens of vocabulary (BERT 30,592, Llama 32,000), sequences of 2,048
    (Llama 4,096)."""
    name = row.get("model", "").strip()
    known = _known(row)
    hidden = number(row, "hidden") or (known.hidden if known else None)
    layers = number(row, "layers") or (known.layers if known else None)
    if not hidden or not layers:
        raise UnpredictableError(f"model {name!r}: hidden size or layers not stated")
    ffn = number(row, "ffn") or (known.ffn if known else 0)
    family = known.family if known else _family(name, hidden, ffn)
    heads = number(row, "heads") or (known.heads if known else max(1, hidden // 128))
    kv_heads = number(row, "kv_heads") or (known.kv_heads if known else heads)
    default_vocab = 30592 if "bert" in name.lower() else 32000 if family == "llama" else 50304
    if hidden % heads:
        raise UnpredictableError(f"heads={heads} do not divide hidden={hidden}")
    return ModelShape(
        name=name or "model",
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn or (4 * hidden if family == "gpt" else -(-8 * hidden // 3 // 256) * 256),
        vocab=number(row, "vocab") or (known.vocab if known else default_vocab),
        seq=number(row, "seq") or (4096 if family == "llama" else 2048),
        tied_embeddings=known.tied if known else family == "gpt",
    )


def _known(row: Row) -> KnownShape | None:
    name = re.sub(r"[-_ ]+", " ", row.get("model", "").lower()).strip()
    if name in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]
    size = re.search(r"(\d+(?:\.\d+)?) ?b\b", name)
    if size is None or "llama" not in name:
        return None
    old = re.search(r"llama ?2\b", name)
    keys = [f"llama 2 {size.group(1)}b"] if old else []
    keys.append(f"llama {size.group(1)}b")
    return next((KNOWN_SHAPES[key] for key in keys if key in KNOWN_SHAPES), None)


def _family(name: str, hidden: int, ffn: int) -> Family:
    gated = any(word in name.lower() for word in _GATED) or (ffn > 0 and ffn != 4 * hidden)
    return "llama" if gated else "gpt"


def recompute_text(row: Row) -> str:
    """Everything that a row says of recomputation and sequence parallelism, in lower case."""
    return f"{row.get('recompute', '')} {row.get('table', '')} {row.get('notes', '')}".lower()
