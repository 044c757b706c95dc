"""A figure with its caption, and how it is written to files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import words

_SHOWN_PT, _LETTER_IN = 7.5, 0.06  # the line below a figure: size, and room per letter
PANEL = ["evidence", "basis", "cluster", "precision", "model", "global_batch", "seq"]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One figure. ``section`` is its heading on the page, ``name`` its file name without suffix,
    and ``shown`` a line below the panels that says what they show, so that the file can be passed
    on without its caption."""

    section: str
    name: str
    caption: str
    figure: Figure
    shown: str = ""


@dataclass(frozen=True)
class SavedPicture:
    """A picture that is on disk; its figure was closed, because figures take much memory."""

    section: str
    name: str
    caption: str
    paths: tuple[Path, Path]  # PNG, SVG


def say_what_it_shows(picture: Picture) -> None:
    """Put the picture's own line below its figure, once, folded to the figure's width."""
    if picture.shown:
        letters = int((picture.figure.get_figwidth() - 0.2) / _LETTER_IN)
        text = textwrap.fill(picture.shown, letters)
        picture.figure.supxlabel(text, fontsize=_SHOWN_PT, color="#555555", x=0.01, ha="left")


def save(picture: Picture, out: Path) -> SavedPicture:
    """Write PNG (200 dots per inch) and SVG, and release the figure.

    The panels are arranged once for both; by default matplotlib would do it twice per file.
    """
    say_what_it_shows(picture)
    engine = picture.figure.get_layout_engine()
    if engine is not None:
        picture.figure.set_dpi(plt.rcParams["savefig.dpi"])  # the width of text depends on it
        engine.execute(picture.figure)
        picture.figure.set_layout_engine(None)
    paths = (out / f"{picture.name}.png", out / f"{picture.name}.svg")
    png, svg = paths
    picture.figure.savefig(png, pil_kwargs={"compress_level": 1})  # 10 % larger, but much faster
    picture.figure.savefig(svg, metadata={"Date": None})  # equal pictures give equal files
    plt.close(picture.figure)
    return SavedPicture(picture.section, picture.name, picture.caption, paths)


def by_evidence(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(suffix for file names, words for captions, rows) per kind of evidence and cluster.

    No figure mixes kinds of evidence or clusters, except for those that compare them.
    """
    keys = ["evidence", "basis", "cluster"]
    for (evidence, basis, cluster), mine in rows.groupby(keys, sort=True):
        kind = [str(word) for word in (evidence, basis) if word]
        suffix = "_".join([*kind, str(cluster)]).replace(" ", "_")
        where = words.cluster_label(str(cluster))
        yield suffix, f"{', '.join(kind)} on {where}", mine


def panel_title(panel: pd.DataFrame) -> str:
    """Model, batch and sequence length of the rows of one panel."""
    row = panel.iloc[0]
    name = words.model_label(row["model"])
    return f"{name}, batch {row['global_batch']} x {row['seq']}, {row['precision']}"
