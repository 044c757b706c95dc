"""Renders job scripts for arrays of points, with Jinja2 templates.

Nothing here calls Slurm. A script is complete and readable, so that it shows exactly what ran.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import CHECKOUT
from benchmarks.launch.slurm.arrays import Array, Resources
from benchmarks.launch.slurm.options import Flags, SlurmOptions, normal, sbatch_words, words


def render_array(array: Array, options: SlurmOptions, runs_dir: Path) -> str:
    """The text of an array's script."""
    sbatch = array_flags(array, options)
    return _render(
        "array.sbatch.j2",
        options,
        runs_dir,
        specs=array.spec_ids,
        nodes=array.resources.nodes,
        ranks_per_node=array.resources.ranks_per_node,
        submission=str(array.submission),
        array=array.name,
        sbatch=sbatch_words(sbatch),
        srun=[shlex.quote(word) for word in words(_srun_flags(array.resources, options))],
        environment=options.environment,
        worker_python=options.worker_interpreter,
        exclusive=sbatch.get("exclusive") is True,
        grace_s=options.grace_s,
        requeue=sbatch.get("requeue") is True,
        checkout=str(checkout_of(array.submission, options)),
    )


def array_flags(array: Array, options: SlurmOptions) -> Flags:
    """All flags of sbatch for an array."""
    resources = array.resources
    throttle = f"%{options.max_running}" if options.max_running else ""
    owned: Flags = {
        "job-name": array.name,
        "array": f"0-{len(array.points) - 1}{throttle}",
        "nodes": resources.nodes,
        "ntasks-per-node": resources.ranks_per_node,
        "output": array.log,
        "open-mode": "append",
        "signal": f"B:USR1@{options.grace_s}",
    }
    defaults: Flags = {"time": resources.minutes, **_gpu_flags(resources, options)}
    return owned | defaults | resources.flags


def _gpu_flags(resources: Resources, options: SlurmOptions) -> Flags:
    """The flag that asks for as many GPUs as ranks, in the site's way; none on CPUs."""
    if not resources.has_gpus or options.gpu_flag == "none":
        return {}
    kind = f"{options.gpu_type}:" if options.gpu_type else ""
    if options.gpu_flag == "gres":
        return {"gres": f"gpu:{kind}{resources.ranks_per_node}"}
    number = 1 if options.gpu_flag == "gpus-per-task" else resources.ranks_per_node
    return {options.gpu_flag: f"{kind}{number}"}


def _srun_flags(resources: Resources, options: SlurmOptions) -> Flags:
    """The flags of srun, which a site may change. A rank must see its neighbours' GPUs to reach
    them directly; so if the job asked for GPUs per task, its step asks for GPUs per node."""
    defaults: Flags = {"cpu-bind": "cores"}
    if resources.has_gpus and options.gpu_flag == "gpus-per-task":
        defaults |= _gpu_flags(resources, replace(options, gpu_flag="gpus-per-node"))
    return defaults | normal(options.srun)


def render_report(submission: Path, sweep: str, options: SlurmOptions, runs_dir: Path) -> str:
    """The text of the report job's script."""
    return _render(
        "report.sbatch.j2",
        options,
        runs_dir,
        report_dir=str(Path(options.report_dir).resolve()),
        sbatch=sbatch_words(report_flags(submission, sweep, options)),
        checkout=str(CHECKOUT),
    )


def report_flags(submission: Path, sweep: str, options: SlurmOptions) -> Flags:
    """All flags of sbatch for the report job."""
    inherited = {
        name: value
        for name, value in options.sbatch_of(1).items()
        if name in ("account", "partition", "qos")
    }
    owned: Flags = {
        "job-name": report_name(sweep),
        "ntasks": 1,
        "output": f"{submission / report_name(sweep)}".replace("%", "%%") + ".log",
        "kill-on-invalid-dep": "yes",
    }
    return owned | {"time": 30} | inherited | normal(options.report_sbatch)


def report_name(sweep: str) -> str:
    """The name of a sweep's report job."""
    return f"{sweep}-report"


def checkout_of(submission: Path, options: SlurmOptions) -> Path:
    """The checkout from which ranks run: this one, or the copy that ``snapshot`` makes."""
    return submission / ".checkout" if options.snapshot else CHECKOUT


def _render(name: str, options: SlurmOptions, runs_dir: Path, **values: Any) -> str:
    return (
        _templates()
        .get_template(name)
        .render(
            python=options.interpreter,
            setup=options.setup,
            runs_dir=str(runs_dir),
            **values,
        )
    )


@lru_cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment
