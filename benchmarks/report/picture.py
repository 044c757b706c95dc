"""A figure with what a reader must know of it, and how it is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import words

PANEL = ["evidence", "basis", "cluster", "precision", "model", "global_batch", "seq"]


@dataclass(frozen=True)
class Picture:
    """One figure: ``section`` is its heading in the page, ``name`` its file's stem, ``shown`` the
    line below it that says what it shows, so that it can be passed on without its caption."""

    section: str
    name: str
    caption: str
    figure: Figure
    shown: str = ""


@dataclass(frozen=True)
class SavedPicture:
    """A picture on disk; its figure is gone, for figures are large."""

    section: str
    name: str
    caption: str
    paths: tuple[Path, Path]  # PNG, SVG


def say_what_it_shows(picture: Picture) -> None:
    """Put the picture's own line below its figure, once."""
    if picture.shown:
        picture.figure.supxlabel(picture.shown, fontsize=7.5, color="#555555", x=0.01, ha="left")


def save(picture: Picture, out: Path) -> SavedPicture:
    """Write PNG (200 dots per inch) and SVG, and release the figure.

    The panels are arranged once: left to itself, matplotlib does it twice per file.
    """
    say_what_it_shows(picture)
    engine = picture.figure.get_layout_engine()
    if engine is not None:
        picture.figure.set_dpi(plt.rcParams["savefig.dpi"])  # letters' widths depend on it
        engine.execute(picture.figure)
        picture.figure.set_layout_engine(None)
    paths = (out / f"{picture.name}.png", out / f"{picture.name}.svg")
    png, svg = paths
    picture.figure.savefig(png, pil_kwargs={"compress_level": 1})  # a tenth larger, much sooner
    picture.figure.savefig(svg, metadata={"Date": None})  # the same file when it is made again
    plt.close(picture.figure)
    return SavedPicture(picture.section, picture.name, picture.caption, paths)


def by_evidence(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Rows of one kind of evidence on one cluster: a suffix for names, words for captions, rows.

    No figure mixes kinds of evidence or clusters, except those that compare them.
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
