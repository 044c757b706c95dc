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
# Reads records through `benchmarks.report`, remakes the report's tables and figures, and looks at
# the speed-up. Set `ZEROPP_RECORDS` to a directory of your own records. `compare.py` is the source;
# `compare.ipynb` is made from it (see "From a notebook" in `docs/report.md`).

# %%
import os
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display
from matplotlib_inline.backend_inline import set_matplotlib_formats

from benchmarks.report import load_frame, style
from benchmarks.report.bars import bars
from benchmarks.report.frame import CELL, best_configuration, latest_ok
from benchmarks.report.headline import REFERENCE, headline_table
from benchmarks.report.losses import loss_curves
from benchmarks.report.scaling import scaling_curves, speedup_maps
from benchmarks.report.tables import memory_table, paired_speedups, speedup_table, throughput_table
from benchmarks.report.step_timelines import step_timelines
from benchmarks.records.stats import paired_ratio, ratio_of_medians

set_matplotlib_formats("png", dpi=72)
pd.set_option("display.max_colwidth", None)
checkout = Path.cwd() if (Path.cwd() / "benchmarks").is_dir() else Path.cwd().parent
records = Path(os.environ.get("ZEROPP_RECORDS", checkout / "results/reference/demo"))
frame, skipped = load_frame([records])
print(f"{len(frame)} records, {len(skipped)} files skipped")
rows = latest_ok(frame)


def plain(table):
    """Without the index, which names the records behind a row."""
    return table.reset_index(drop=True)


def show(pictures):
    for picture in pictures:
        display(Markdown(picture.caption), picture.figure)


# %% [markdown]
# ## The comparison
# Ranges are 95 % bootstrap intervals of medians; `~` marks a speed-up that its samples
# do not settle.

# %%
headline_table(rows)

# %%
plain(throughput_table(rows).drop(columns=["cluster", "evidence"]))

# %%
plain(memory_table(rows).drop(columns=["cluster", "evidence"]))

# %%
show(bars(rows))

# %%
show(scaling_curves(rows))

# %% [markdown]
# ## The speed-up
# Pairs of fastest configurations in the same cell; the last line is their geometric mean.

# %%
plain(speedup_table(rows))

# %%
show(speedup_maps(rows))

# %%
pairs = paired_speedups(rows)
for (evidence, contender), group in pairs.groupby(["evidence", "contender"]):
    mean = paired_ratio(list(group["speedup"]))
    print(
        f"{contender}, {evidence}: {mean.median:.2f} [{mean.low:.2f}, {mean.high:.2f}], "
        f"{len(group)} cells, {int(group['unsure'].sum())} of them unsure"
    )

# %% [markdown]
# ### What is under the medians
# Every timed step of each contender's fastest configuration. A speed-up is worth something where
# the clouds do not touch.

# %%
best = best_configuration(rows)
best = best[best["evidence"] == "measured"]
figure, axes = style.panels(best.groupby(CELL).ngroups, columns=4, width=2.6, height=2.4)
for axis, (_, cell) in zip(axes, best.groupby(CELL), strict=True):
    for row in cell.itertuples():
        steps = range(1, len(row.samples_step_s) + 1)
        axis.plot(steps, row.samples_step_s, **style.line(row.contender), label=row.contender)
    axis.set_title(f"{row.model}, {row.num_gpus} ranks")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("timed step")
axes[0].set_ylabel("step [s]")
style.legend(figure, axes)
display(figure)

# %% [markdown]
# ### Would half of the steps say the same?
# The speed-up from the first and from the second half alone. Where the two intervals do not
# overlap, the machine was not the same throughout, and the whole is worth less than its interval.


# %%
def halves(cell):
    reference = cell[cell["contender"] == REFERENCE]["samples_step_s"].squeeze()
    lines = []
    for row in cell[cell["contender"] != REFERENCE].itertuples():
        steps, line = row.samples_step_s, {"model": row.model, "ranks": row.num_gpus}
        line["contender"] = row.contender
        for name, part in {"first": slice(None, 5), "second": slice(5, None)}.items():
            ratio = ratio_of_medians(reference[part], steps[part])
            line[f"{name} half"] = f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        lines.append(line)
    return lines


both = [cell for _, cell in best.groupby(CELL) if REFERENCE in set(cell["contender"])]
pd.DataFrame([line for cell in both for line in halves(cell)])

# %% [markdown]
# ### What the speed is paid with
# Throughput and peak memory of both as ratios: above 1 in the first and below 1 in the second is
# better in both.

# %%
pairs.set_index(["model", "num_gpus", "contender"])[["speedup", "memory_ratio"]].round(2)

# %% [markdown]
# ## What a step looks like, and what it trains

# %%
show(list(step_timelines(rows))[:1])

# %%
show(loss_curves(rows))
