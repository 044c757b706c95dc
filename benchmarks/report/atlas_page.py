"""One page on which a reader finds their own case: choices of model, sequence, cluster, GPUs and
batch, every program's speed, memory and plan there, and a map of who is fastest.

The page is one HTML file that needs no network: Altair describes the charts, and Vega, which stands
in the file, draws them. A script of its own answers the title for the case that is chosen, and
leaves only choices that exist. Its rows are those of ``latest_ok``.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from itertools import product
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.records.record import write_atomically
from benchmarks.records.simulated import BASES
from benchmarks.report import display, style
from benchmarks.report.frame import CELL, best_or_failed
from benchmarks.report.ratio_errors import NONE_WITH_TP, factor, need_text
from benchmarks.report.searches import MOST_GAP
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import ATLAS, ROWS, candidate_in, program_label
from benchmarks.specification.reading import beside_preset, flat, validated
from zeropp.choose.contender import overrides
from zeropp.types.shape import ModelShape

if TYPE_CHECKING:
    import altair as alt

CHOICES = {  # the columns of a case, and what the page calls them
    "model": "Model",
    "seq": "Sequence, tokens",
    "precision": "Precision",
    "cluster": "Cluster",
    "num_gpus": "GPUs",
    "per_gpu": "Sequences per GPU and step",
}
_OF_MAP = [*CHOICES][:-2]  # the others are its sides
_NUMBERS = ("seq", "num_gpus", "per_gpu")
# Rows whose plans with and without tensor parallelism come from one search.
_WHOLE = {name for name, row in ROWS.items() if row.contender.space.tensor
          and not name.endswith(("_tp", "_tp1")) and name != "deepspeed_3d"}  # fmt: skip
WITHIN = "within the errors"
# Pixels of a chart, and letters of a plan's and of a command's line in it.
_WIDTH, _PLAN, _COMMAND = 324, 58, 54
# What Altair has no words for: side by side where there is room, one below the other on a phone.
_LAYOUT = {"columns": {"signal": "windowSize()[0] > 800 ? 2 : 1"}, "align": "none"}
_FIELDS = ["speed", "low", "high", "text", "plan", "command"]
_STYLE = """<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark; --ink: #1b1b1b; --ground: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --ground: #161616 } }
body { font: 15px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 820px; margin: 1rem auto; padding: 0 12px }
body .vega-embed.vega-embed { flex-direction: column; padding: 0 }
.vega-embed svg { max-width: 100%; height: auto }
.vega-embed svg text { fill: var(--ink) }
form.vega-bindings { order: -1; display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 8px 0 }
h1 { font-size: 1.3rem }
.vega-bind-name { margin-right: 4px } select { font: inherit }
@media print { :root { --ink: #000; --ground: #fff } .vega-embed svg { max-height: 190mm } }
</style>"""


# Selects follow one another: each offers what exists for the choices before it.
_SCRIPT = """
const names = Object.keys(CHOICES), keys = Object.keys(CASES).map(key => key.split("|"));
let busy = false;
function follow() {
  const all = names.map(n => document.querySelector(`form.vega-bindings select[name="${n}"]`));
  if (all.some(select => !select)) return setTimeout(follow, 50);
  if (busy) return;
  busy = true;
  all.forEach((select, i) => {
    const known = keys.filter(key => all.slice(0, i).every((other, j) => other.value === key[j]));
    for (const option of select.options)
      option.hidden = option.disabled = !known.some(key => key[i] === option.value);
    if (select.selectedOptions[0].disabled) {
      select.value = known[0][i];
      select.dispatchEvent(new Event("change", { bubbles: true }));
    }
  });
  document.getElementById("answer").textContent = CASES[all.map(s => s.value).join("|")];
  busy = false;
}
document.addEventListener("change", follow);
document.addEventListener("input", follow);
follow();
"""


def write_page(
    rows: pd.DataFrame, path: Path, measured: Callable[[dict[Any, Any]], str] = lambda _: ""
) -> str:
    """Write the page of the simulated rows; returns why there is none, in one line, where Altair is
    not installed, and else nothing. ``measured`` tells of a row's case what was measured."""
    if missing := [name for name in ("altair", "vl_convert") if find_spec(name) is None]:
        needed = "pip install altair vl-convert-python"
        return f"{path.name} is left out: {missing[0]} is not installed ({needed})"
    page = chart(rows).to_html(
        inline=True,
        embed_options={
            "actions": False,
            "renderer": "svg",
            "patch": [
                {"op": "add", "path": f"/layout/{name}", "value": value}
                for name, value in _LAYOUT.items()
            ],
        },
    )
    title = "Do I need tensor parallelism? Find your case"
    head = f'<head><title>{title}</title><link rel="icon" href="data:,">{_STYLE}'
    reach = factor(one_program=False)
    types = "as its users run it" if (rows["basis"] == BASES["own"]).any() else "gradients in fp32"
    text = (
        f"Every program at the best plan that a search has found, {types}. All "
        "numbers are simulated. Nine in ten ratios of any two programs are measured within a "
        f"factor of {reach:.2f} of the simulated ones: where the grey ends of two bars overlap, "
        "either may be faster, and the map is grey where the two fastest programs are that near. "
        "The first line has the larger error of a plan without tensor parallelism over one with it."
    )
    place = '<div class="vega-visualization"'
    page = page.replace("<head>", head, 1).replace(
        place,
        f'<h1>{escape(title)}</h1><p id="answer"></p><p>{escape(text)}</p>{place}',
    )
    known = f"const CHOICES = {json.dumps(CHOICES)}, CASES = {json.dumps(answers(rows, measured))};"
    drawn, end, rest = page.rpartition("</body>")  # Vega's own code has the word, too
    page = f"{drawn}<script>{known}{_SCRIPT}</script>{end}{rest}"
    write_atomically(path, page)
    return ""


def ratios_of(rows: pd.DataFrame) -> dict[str, Any]:
    """Of one cell the fastest speed, and the speed without tensor parallelism over that with it: of
    all programs, of all but Megatron-FSDP, and of Megatron-Core alone; 0 where nothing without it
    fits. Where a whole program has been searched, and its best plan has none, its best with it is
    at most as fast: the ratio is at least (``bound``) what it would be with that. ``cut``: what a
    search left may be the fastest plan of its side by more than ``MOST_GAP``."""
    is_none = rows["tokens_per_s_per_gpu"].isna()
    unknown = "gap" in rows and bool((rows["gap"][is_none] > 0).any())
    rows = rows[~is_none]
    has_tp = rows["plan"].str.contains(r"(?<!\S)tp=", na=False)
    is_whole = rows["contender"].isin(_WHOLE)
    programs, speed = rows["contender"].map(program_label), rows["tokens_per_s_per_gpu"]
    gaps = rows["gap"].fillna(float("inf")) if "gap" in rows else 0.0 * speed
    out: dict[str, Any] = {"fastest": speed.max()}
    groups = {"without": programs.notna(), "without_fsdp": programs != "Megatron-FSDP"}
    for name, own in (groups | {"core": programs == "Megatron-Core"}).items():
        having, lacking = own & (has_tp | is_whole), own & ~has_tp
        best = speed[having].max() if having.any() else 0.0
        fastest = speed[lacking].max() if lacking.any() else 0.0
        out[name] = fastest / best if best else float("inf" if fastest else "nan")
        if name == "without":
            out["bound"] = not (has_tp & (speed == best)).any()
            two = rows.index.isin([speed[of].idxmax() for of in (having, lacking) if of.any()])
            may_be = speed / (1.0 - gaps).clip(lower=0.0) * (1.0 - MOST_GAP)
            wins = (lacking & (may_be > fastest)) | (having & (may_be > best))
            out["cut"] = unknown or bool(wins.any())
            out["one_program"] = programs[two].nunique() == 1
    others = ("Megatron-Core", "FSDP2")
    of_zeropp = speed[programs == "ZeroPP"].max()
    return out | {f"over_{name}": of_zeropp / speed[programs == name].max() for name in others}


def answers(rows: pd.DataFrame, measured: Callable[[dict[Any, Any]], str]) -> dict[str, str]:
    """By case, whether it needs tensor parallelism, and what was measured of it."""
    found = _shown(rows)
    plans = [source["plan"] for source in found["source"]]
    found = found.assign(
        plan=[plan.get("words", "") for plan in plans],
        gap=[plan.get("gap", 0.0) for plan in plans],
        key=["|".join(_choices(row)) for row in found.to_dict("records")],
    )
    texts = {}
    for key, of in found.groupby("key", sort=False):
        ratios = ratios_of(of)
        text = need_text(ratios["without"], one_program=ratios["one_program"], is_cut=ratios["cut"])
        if not any(ROWS[name].contender.space.tensor for name in of["contender"]):
            text = NONE_WITH_TP
        texts[str(key)] = " ".join(filter(None, (text, measured(of.to_dict("records")[0]))))
    return texts


def cases(rows: pd.DataFrame) -> pd.DataFrame:
    """A line per case and contender, with the texts of the page; older tables have others."""
    return pd.DataFrame([*map(_case, _shown(rows).to_dict("records"))])


def _shown(rows: pd.DataFrame) -> pd.DataFrame:
    """The simulated rows, each program as its users run it where it has been searched so."""
    order = [*{**ATLAS, **ROWS}]
    is_shown = rows["evidence"].str.startswith("simulated") & rows["contender"].isin(order)
    best = best_or_failed(rows[is_shown & (rows["basis"] != BASES["own"])])
    own = best_or_failed(rows[is_shown & (rows["basis"] == BASES["own"])])
    keys = [*(name for name in CELL if name != "basis"), "contender"]
    best = pd.concat([own, best]).drop_duplicates(keys) if len(own) else best
    return best.sort_values("contender", key=lambda names: names.map(order.index), kind="stable")


def _choices(row: dict[Any, Any]) -> list[str]:
    """The values of ``CHOICES``, as the page shows them."""
    return [
        display.model_label(row["model"]).removesuffix(f" {row['seq'] // 1024}k"),
        f"{row['seq']:,}",
        row["precision"],
        display.cluster_label(row["cluster"]),
        f"{row['num_gpus']:,}",
        f"{row['global_batch'] / row['num_gpus']:g}",
    ]


def _case(row: dict[Any, Any]) -> dict[str, Any]:
    line: dict[str, Any] = dict(zip(CHOICES, _choices(row), strict=True)) | {
        "contender": display.contender_label(row["contender"]),
        "program": program_label(row["contender"]),
        "colour": style.colour(ROWS[row["contender"]].contender.name),
    }
    line["key"] = "|".join(line[name] for name in (*CHOICES, "contender"))
    if row["status"] != "ok":
        return line | {"text": f"{line['contender']}\n{row['reason']}", "plan": "", "command": ""}
    speed, reach = row["tokens_per_s_per_gpu"], sqrt(factor(one_program=False))
    memory = f"{row['peak_gib']:.0f} of {row['memory_limit_gib']:.0f} GiB"
    return line | {
        "speed": round(speed, 1),
        "low": round(speed / reach, 1),
        "high": round(speed * reach, 1),
        "text": f"{line['contender']}\n{speed:,.0f} tokens/s/GPU, MFU {row['mfu']:.0%}, {memory}",
        "plan": _folded(row["source"]["plan"].get("words") or row["layout"], _PLAN),
        "command": _folded(_command(row), _COMMAND),
    }


def _folded(text: str, letters: int) -> str:
    return "\n".join(textwrap.wrap(text, letters, break_on_hyphens=False))


def _command(row: dict[Any, Any]) -> str:
    """The line that measures a row's plan; empty if its contender can be simulated only, or if the
    row has the plan of another program, as the bound may."""
    knobs = dict(row["knobs"])
    size = knobs.pop("microbatch_size")
    try:
        contender, candidate = candidate_in(row["contender"], knobs, size)[1:]
    except SpecError:
        return ""
    if not contender.trainer:
        return ""
    spec = row["source"]["spec"]
    own, seq = spec["model"]["name"], spec["model"]["seq"]
    long = f"_{seq // 1024}k"
    model = replace(validated(ModelShape, spec["model"]), name=own.removesuffix(long))
    words = [f"model={model.name}", *flat(beside_preset("model", model), "model")]
    words += [f"cluster={spec['cluster']['name']}", f"num_gpus={row['num_gpus']}"]
    if (share := spec.get("bandwidth", 1.0)) != 1.0:
        rate = share * spec["cluster"]["inter"]["bandwidth_gb_s"]
        words.append(f"cluster.inter.bandwidth_gb_s={rate:g}")
    words += [f"global_batch={row['global_batch']}", f"precision={row['precision']}"]
    words += ["launcher=simulate"] * (not contender.runs(candidate.knobs))
    return " ".join(["zeropp run", *words, "data=synthetic", *overrides(candidate)])


def chart(rows: pd.DataFrame) -> alt.ConcatChart:
    """The choices, a bar per contender, the command of one, and the map."""
    import altair as alt

    lines = cases(rows)
    # The page opens in the middle of the largest map.
    maps = lines.groupby(_OF_MAP, sort=False)
    largest = max((of for _, of in maps), key=len)
    first = largest.iloc[len(largest) // 2]
    options = {
        name: sorted(lines[name].unique(), key=lambda text: float(text.replace(",", "")))
        if name in _NUMBERS
        else list(dict.fromkeys(lines[name]))
        for name in (*CHOICES, "contender")
    }  # fmt: skip
    choices = [
        alt.param(name=name, value=str(first[name]) if name in CHOICES else options[name][0],
                  bind=alt.binding_select(options=options[name], name=f"{words} "))
        for name, words in {**CHOICES, "contender": "Show the command of"}.items()
    ]  # fmt: skip
    left = alt.vconcat(_bars(lines, options["contender"]), _command_of(lines), spacing=4)
    return (
        alt.concat(left, _map(lines, options), columns=2, spacing=40)
        .resolve_scale(color="independent")  # so that the map's legend stands below it
        .add_params(*choices)
        .configure(background="transparent", font="system-ui, sans-serif", view={"stroke": None})
    )


def _looked_up(chart: Any, lines: pd.DataFrame, contender: str) -> Any:
    """The chart with the texts of a contender in the chosen case."""
    import altair as alt

    key = " + '|' + ".join([*CHOICES, contender])
    from_ = alt.LookupData(lines[["key", *_FIELDS]], "key", _FIELDS)
    return chart.transform_calculate(key=key).transform_lookup("key", from_=from_)


def _bars(lines: pd.DataFrame, names: list[str]) -> alt.LayerChart:
    """Every contender's speed in the chosen case, with its plan in words."""
    import altair as alt

    colours = dict(zip(lines["contender"], lines["colour"], strict=True))
    table = pd.DataFrame({"contender": names, "colour": [colours[name] for name in names]})
    base = alt.Chart().encode(y=alt.Y("contender:N", sort=names, axis=None))
    texts = base.encode(x=alt.value(0))
    words: dict[str, Any] = {"align": "left", "baseline": "top", "lineBreak": "\n"}
    axis = alt.Axis(grid=False, title="tokens per second and GPU")
    layers = [
        base.mark_bar(height=9).encode(
            x=alt.X("speed:Q", axis=axis, stack=None), color=alt.Color("colour:N", scale=None)
        ),
        base.mark_rule(color="#888", strokeWidth=2).encode(x="low:Q", x2="high:Q"),
        texts.mark_text(**words, fontSize=11, dy=-33).encode(text="text:N"),
        texts.mark_text(**words, fontSize=10, dy=7).encode(text="plan:N"),
    ]
    none = "datum.text ? datum.text : datum.contender + '\\nnot searched for this choice'"
    return (
        _looked_up(alt.layer(*layers, data=table), lines, "datum.contender")
        .transform_calculate(text=none, plan="datum.plan || ''")
        .properties(width=_WIDTH, height={"step": 108})
    )


def _command_of(lines: pd.DataFrame) -> alt.Chart:
    """The command that measures the chosen contender's plan."""
    import altair as alt

    none = "datum.command ? datum.command : 'no command: nothing fits, or it can be simulated only'"
    return (
        _looked_up(alt.Chart(pd.DataFrame({"none": [0]})), lines, "contender")
        .transform_calculate(command=none)
        .mark_text(align="left", baseline="top", lineBreak="\n", fontSize=10, font="monospace")
        .encode(x=alt.value(0), y=alt.value(0), text="command:N")
        .properties(width=_WIDTH, height=170)
    )


def _map(lines: pd.DataFrame, options: dict[str, list[str]]) -> alt.LayerChart:
    """Who is fastest over GPUs and batch, and by how much: grey within the errors."""
    import altair as alt

    pairs = product(options["num_gpus"], options["per_gpu"])
    colours = {**dict(zip(lines["program"], lines["colour"], strict=True)), WITHIN: style.NEUTRAL}
    base = alt.Chart().encode(
        x=alt.X("num_gpus:O", sort=options["num_gpus"], title="GPUs", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("per_gpu:O", sort=options["per_gpu"][::-1], title="sequences per GPU and step"),
    )
    legend = alt.Legend(title="fastest", orient="bottom", columns=2)
    scale = alt.Scale(domain=[*colours], range=[*colours.values()])
    here = "datum.num_gpus == num_gpus && datum.per_gpu == per_gpu"
    layers = [
        base.mark_rect(opacity=0.55).encode(
            color=alt.Color("shown:N", scale=scale, legend=legend),
            stroke=alt.condition(here, alt.value("#d60000"), alt.value("transparent")),
            strokeWidth=alt.value(3),
        ),
        base.mark_text(fontSize=9, lineBreak="\n", limit=_WIDTH // len(options["num_gpus"])).encode(
            text="words:N"
        ),
    ]
    key = " + '|' + ".join([*_OF_MAP, "datum.num_gpus", "datum.per_gpu"])
    winners = pd.DataFrame([*_winners(lines)])
    from_ = alt.LookupData(winners, "case", ["shown", "words"])
    return (
        alt.layer(*layers, data=pd.DataFrame(pairs, columns=["num_gpus", "per_gpu"]))
        .transform_calculate(case=key)
        .transform_lookup("case", from_=from_, default="")
        .transform_calculate(words="datum.words ? datum.words : 'not searched'")
        .properties(width=_WIDTH, height=60 * len(options["per_gpu"]))
    )


def _winners(lines: pd.DataFrame) -> Iterator[dict[str, str]]:
    """By case the fastest contender, or that the next program is within the errors."""
    for key, of in lines.groupby(lines["key"].str.rpartition("|")[0], sort=False):
        ranked = of.dropna(subset="speed").sort_values("speed", ascending=False)
        if ranked.empty:
            yield {"case": str(key), "shown": "", "words": "nothing fits"}
            continue
        first = ranked.iloc[0]
        others = ranked[ranked["program"] != first["program"]]
        ahead = first["speed"] / others["speed"].iloc[0] if len(others) else float("inf")
        near = ahead < factor(one_program=False)
        yield {
            "case": str(key),
            "shown": WITHIN if near else str(first["program"]),
            "words": first["program"].replace("-", "-\n")  # a cell is narrow
            + (f"\n{ahead:.2f} ×" if len(others) else "\nalone"),
        }
