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
# Reads records through `benchmarks.api`, and nothing else of the suite. Set `ZEROPP_RECORDS` to a
# directory of your own records. This is the source; the notebook with its outputs is made from it
# (see "From Python" in `docs/report.md`).

# %%
import os
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


def show(pictures):
    for picture in pictures:
        display(Markdown(picture.caption), picture.figure)


# %% [markdown]
# ## The comparison
# The table of a paper. `api.paper_latex(frame)` is the same for LaTeX, `api.paper_table(frame)` the
# same as numbers.

# %%
Markdown(api.paper_markdown(frame))

# %%
paper = api.paper_table(frame).rename(columns={"num_gpus": "ranks"})
paper[["model", "ranks", "contender", "tokens_per_s_per_gpu", "peak_gib", "speedup"]].round(3)

# %%
show(api.figures(frame, "Throughput"))

# %%
show(api.figures(frame, "Scaling"))

# %% [markdown]
# ## The speed-up
# Pairs of fastest configurations in the same cell; the last line is the median of the cells. A
# speed-up is unsettled where its samples leave a doubt, which the last column names.

# %%
numbers = api.tables(frame)
speedups = numbers["speedup"].rename(columns={"num_gpus": "ranks"})
speedups = speedups.astype({"ranks": "Int64"})  # the median has none
ends = ["speedup_low", "speedup_high"]
speedups[["model", "ranks", "contender", "speedup", *ends, "speedup_unsettled"]].round(2)

# %%
show(api.figures(frame, "Speed-up"))

# %% [markdown]
# ### What is under the medians
# Every timed step of each contender's fastest configuration. A speed-up is worth something where
# the clouds do not touch.

# %%
fastest = frame.sort_values("tokens_per_s_per_gpu").drop_duplicates(
    ["model", "num_gpus", "contender"], keep="last"
)
fastest = fastest.sort_values(["parameters", "num_gpus", "contender"])
for row in fastest.itertuples():
    steps = np.sort(row.samples_step_s)
    print(
        f"{row.model:10} {row.num_gpus} ranks {row.contender:14} "
        f"min {steps[0]:.3f}  median {np.median(steps):.3f}  max {steps[-1]:.3f} s, n={len(steps)}"
    )

# %% [markdown]
# ### Would half of the steps say the same?
# The speed-up from the first and from the second half of the timed steps alone (of an odd number
# the second half has one more). Where the two are far apart, the machine was not the same
# throughout, and the whole is worth less than its interval.


# %%
def first_half(steps):
    return steps[: len(steps) // 2]


def second_half(steps):
    return steps[len(steps) // 2 :]


halves = []
for (model, ranks), cell in fastest.groupby(["model", "num_gpus"], sort=False):
    steps = cell.set_index("contender")["samples_step_s"]
    if "deepspeed_3d" not in steps:
        continue
    for contender in steps.index.drop("deepspeed_3d"):
        line = {"model": model, "ranks": ranks, "contender": contender}
        pair = steps["deepspeed_3d"], steps[contender]
        for name, part in {"first half": first_half, "second half": second_half}.items():
            base, ours = (np.median(part(taken)) for taken in pair)
            line[name] = round(base / ours, 2)
        halves.append(line)
pd.DataFrame(halves)

# %% [markdown]
# ### What the speed is paid with
# Throughput and peak memory of both as ratios: above 1 in the first and below 1 in the second is
# better in both.

# %%
speedups.set_index(["model", "ranks", "contender"])[["speedup", "memory_ratio"]].round(2)

# %%
show(api.figures(frame, "Memory"))

# %% [markdown]
# ## What a step looks like, and what it trains

# %%
show(api.figures(frame, "Timelines"))

# %%
show(api.figures(frame, "Loss"))
