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
# # Do I need tensor parallelism? The verdict's cells
#
# A thesis may start here: every cell of `docs/verdict.md` as rows, simulated, each program at its
# best plan. Reads `plans.csv` through `benchmarks.api`; set `ZEROPP_RECORDS` to the folder of
# your own study (`report_dir` of `experiment=claim_33` or `claim_33_quick`). How far a simulated
# ratio may be off is in `docs/simulator.md`; intervals of every cell are in `verdict.csv`.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown, display
from matplotlib_inline.backend_inline import set_matplotlib_formats

from benchmarks import api

set_matplotlib_formats("retina")
pd.set_option("display.max_rows", 200)
pd.set_option("display.max_colwidth", None)
checkout = Path.cwd() if (Path.cwd() / "benchmarks").is_dir() else Path.cwd().parent
records = Path(os.environ.get("ZEROPP_RECORDS", checkout / "results/reference/claim_33"))
everything = api.load(records)
print(everything.groupby("basis").size().to_string())

# %% [markdown]
# The network as it is, and the best plan of every program. Other bases of comparison (`basis`) and
# networks (`cluster` with a factor) are in `everything`; no cell mixes them.

# %%
whole = ~everything["cluster"].str.contains("×")
frame = everything[whole & (everything["basis"] == "best plans")]
cell = list(dict.fromkeys(["cluster", *api.cell_columns(frame)]))
print(f"{frame.groupby(cell).ngroups} cells, {frame['contender'].nunique()} rows of comparison")

# %% [markdown]
# ## ZeroPP's speed over that of every other
# One line per cell, one column per opponent: above 1 ZeroPP is faster.

# %%
speed = frame.pivot(index=cell, columns="contender", values="tokens_per_s_per_gpu")
ratios = speed.rdiv(speed["zeropp"], axis="index").drop(columns="zeropp")
sequences = ratios.index.get_level_values("global_batch") / ratios.index.get_level_values(
    "num_gpus"
)
ratios.rename(columns=lambda name: name.replace("_", " ")).round(2)

# %% [markdown]
# ## Medians over cells
# By sequences per GPU and step, with the lowest and the highest cell. A median over these cells is
# no average over what people train.

# %%
groups = {"1 sequence": sequences == 1, "4 or more": sequences >= 4}
medians = pd.concat(
    {
        f"{name}, {chosen.sum()} cells": ratios[chosen].agg(["median", "min", "max"]).T
        for name, chosen in groups.items()
    },
    axis="columns",
)
medians.sort_values(medians.columns[3], ascending=False).round(2)

# %%
figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
order = list(ratios.median().sort_values().index)
for shift, (name, chosen) in enumerate(groups.items()):
    for place, contender in enumerate(order):
        values = ratios.loc[chosen, contender].dropna()
        label = name if place == 0 else None
        height = [place + 0.25 * (1 - shift)] * len(values)
        axis.plot(values, height, "o^"[shift], ms=4, alpha=0.6, color=f"C{shift}", label=label)
axis.set_yticks(range(len(order)), order)
axis.axvline(1.0, color="black", linewidth=0.8)
axis.set_xlabel("speed of ZeroPP over that of ... (simulated, a mark per cell)")
axis.legend(title="sequences per GPU")
display(figure)

# %% [markdown]
# ## What the best plans are
# Whether the fastest plan has tensor parallelism, per program.

# %%
ran = frame[frame["status"] == "ok"]
has_tp = ran["layout"].str.contains(r"\btp=")
shares = has_tp.groupby(ran["contender"]).agg(cells="size", with_tp="sum")
shares.assign(share=(shares["with_tp"] / shares["cells"]).round(2))

# %% [markdown]
# ## One cell
# Every program in the cell with the most GPUs, the fastest first.

# %%
largest = frame.sort_values(["num_gpus", "parameters", "global_batch"]).iloc[-1]
same = (frame[cell] == largest[cell]).all(axis="columns")
display(Markdown(", ".join(f"{name} {largest[name]}" for name in cell)))
columns = ["contender", "layout", "step_s", "tokens_per_s_per_gpu", "mfu", "peak_gib"]
frame[same].sort_values("step_s")[columns].round(3).reset_index(drop=True)

# %% [markdown]
# ## For the thesis
# The table of a few opponents; `Markdown` here, LaTeX for `\\input` from the same call.

# %%
few = frame[frame["contender"].isin(["zeropp", "deepspeed_3d", "megatron_core", "fsdp"])]
text = api.paper_latex(few, base="megatron_core")
print(text[: text.index("\\midrule")])
columns = ["tokens_per_s_per_gpu", "speedup"]
Markdown(api.paper_markdown(few, base="megatron_core", columns=columns))
