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
# the speed-up. Set `ZEROPP_RECORDS` to a directory of your own records.

# %%
import os
from pathlib import Path

from matplotlib_inline.backend_inline import set_matplotlib_formats

from benchmarks.report import load_frame
from benchmarks.report.bars import bars
from benchmarks.report.frame import best_configuration, latest_ok
from benchmarks.report.headline import headline_table
from benchmarks.report.losses import loss_curves
from benchmarks.report.tables import paired_speedups, speedup_table
from benchmarks.report.timelines import step_timelines
from benchmarks.stats import paired_ratio

set_matplotlib_formats("png")
checkout = Path.cwd() if (Path.cwd() / "benchmarks").is_dir() else Path.cwd().parent
records = Path(os.environ.get("ZEROPP_RECORDS", checkout / "results/reference"))
frame, skipped = load_frame([records])
print(f"{len(frame)} records, {len(skipped)} files skipped")
rows = latest_ok(frame)

# %% [markdown]
# ## The comparison
# Ranges are 95 % bootstrap intervals of medians; `~` marks a timing whose spread is too large.

# %%
headline_table(rows)

# %%
for picture in bars(rows):
    print(picture.caption)
    display(picture.figure)  # noqa: F821

# %% [markdown]
# ## The speed-up over DeepSpeed 3D

# %%
speedup_table(rows)

# %%
pairs = paired_speedups(rows)
for (evidence, contender), group in pairs.groupby(["evidence", "contender"]):
    mean = paired_ratio(list(group["speedup"]))
    print(f"{contender}, {evidence}: {mean.median:.2f} [{mean.low:.2f}, {mean.high:.2f}], "
          f"{len(group)} cells, {int(group['unsure'].sum())} of them unsure")

# %% [markdown]
# How the raw steps are spread, before any median:

# %%
best = best_configuration(rows)
best.set_index(["model", "num_gpus", "evidence", "contender"])["samples_step_s"].explode().astype(float).groupby(
    level=[0, 1, 2, 3]
).describe().round(4)

# %% [markdown]
# ## What a step looks like, and what it trains

# %%
for picture in [*step_timelines(rows), *loss_curves(rows)]:
    print(picture.caption)
    display(picture.figure)  # noqa: F821
