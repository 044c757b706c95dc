# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # ZeroPP beside its contenders
#
# Reads records through `benchmarks.api`, and nothing else of the suite. Rows are the report's: one per
# specification and kind of machine. Set `ZEROPP_RECORDS` to a directory of your own records; the
# verdict has a notebook of its own, `verdict.py`. This is the source; the notebook with its outputs is made from it
# (see "From Python" in `docs/report.md`).

# %%
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import Markdown, display
from matplotlib_inline.backend_inline import set_matplotlib_formats

from benchmarks import api

set_matplotlib_formats("retina")  # labels can be read, also in a narrow column
pd.set_option("display.max_colwidth", None)
checkout = Path.cwd() if (Path.cwd() / "benchmarks").is_dir() else Path.cwd().parent
records = Path(os.environ.get("ZEROPP_RECORDS", checkout / "results/reference/demo"))
frame = api.load(records)
print(f"{len(frame)} configurations, {frame['model'].nunique()} models")
cell = api.cell_columns(frame)  # what tells these records' cells apart
MOST = 4  # pictures of one kind
short = {"num_gpus": "ranks", "global_batch": "batch"}


def show(section):
    first = list(islice(api.figures(frame, section), MOST + 1))
    for picture in first[:MOST]:
        display(Markdown(picture.caption), picture.figure)
    if not first:
        display(Markdown(f"*These records have nothing to draw under {section}.*"))
    elif len(first) > MOST:
        display(Markdown(f"*These are the first {MOST}; `zeropp report` draws all.*"))


def table(rows, columns, digits):
    """Columns of a table that have a number or a word, or a sentence where there is no row."""
    if rows.empty:
        return Markdown("*No cell of these records has two contenders that ran.*")
    kept = rows[[*cell, "contender", *columns]].dropna(axis="columns", how="all").round(digits)
    return kept.rename(columns=short).reset_index(drop=True).astype(object).fillna("")


# %% [markdown]
# ## The comparison
# The table of a paper. `api.paper_latex(frame)` is the same for LaTeX, `api.paper_table(frame)` the
# same as numbers.

# %%
Markdown(api.paper_markdown(frame))

# %%
table(api.paper_table(frame), ["tokens_per_s_per_gpu", "peak_gib", "speedup"], 3)

# %%
show("Throughput")

# %%
show("Scaling")

# %% [markdown]
# ## The speed-up
# Pairs of fastest configurations in the same cell; the last line is the median of the cells. A
# speed-up is unsettled where its samples leave a doubt, which the last column names.

# %%
speedups = api.tables(frame)["speedup"]
speedups = speedups.astype(dict.fromkeys(("num_gpus", "global_batch", "seq"), "Int64"))
table(speedups, ["speedup", "speedup_low", "speedup_high", "speedup_unsettled"], 2)

# %%
show("Speed-up")

# %% [markdown]
# ### What is under the medians
# Every timed step of each contender's fastest configuration. A speed-up is worth something where
# the clouds do not touch. A simulated step is one number, so it has no line here.

# %%
fastest = api.fastest(frame)
measured = fastest[(fastest["evidence"] == "measured") & (fastest["samples_step_s"].map(len) > 1)]
for row in measured.to_dict("records"):
    steps = np.sort(row["samples_step_s"])
    print(
        f"{' '.join(str(row[name]) for name in cell):14} {row['contender']:14} "
        f"min {steps[0]:.3f}  median {np.median(steps):.3f}  max {steps[-1]:.3f} s, n={len(steps)}"
    )
if measured.empty:
    print("These records have no timed steps.")

# %% [markdown]
# ### Would half of the steps say the same?
# The speed-up from the first and from the second half of the timed steps alone (of an odd number
# the second half has one more). Where the two are far apart, the machine was not the same
# throughout, and the whole is worth less than its interval.


# %%
def halves(steps):
    """The medians of the first and of the second half."""
    middle = len(steps) // 2
    return np.median(steps[:middle]), np.median(steps[middle:])


lines = []
for key, rows in measured.groupby(cell, sort=False):
    medians = {row.contender: halves(row.samples_step_s) for row in rows.itertuples()}
    base = medians.pop("deepspeed_3d", None) or medians.pop("deepspeed", None)
    for contender, parts in medians.items() if base else ():
        line = dict(zip(cell, key, strict=True)) | {"contender": contender}
        line |= {"first half": base[0] / parts[0], "second half": base[1] / parts[1]}
        lines.append(line)
table(pd.DataFrame(lines), ["first half", "second half"], 2)

# %% [markdown]
# ### What the speed is paid with
# Throughput and peak memory of both as ratios: above 1 in the first and below 1 in the second is
# better in both.

# %%
table(speedups, ["speedup", "memory_ratio"], 2)

# %%
show("Memory")

# %% [markdown]
# ## What a step looks like, and what it trains

# %%
show("Timelines")

# %%
show("Loss")
