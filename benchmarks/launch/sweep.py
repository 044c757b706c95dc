"""Runs a sweep: gives points to their launchers, collects the records and makes the report.

What is still to run is decided after the launcher's ``settle`` (``Launcher``) and under a
lock, so that two sweeps at once run each point once.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, get_args

from filelock import FileLock, Timeout

from benchmarks.launch import local, replay, simulate, trace
from benchmarks.launch.attempt import PROVENANCE, Ending
from benchmarks.launch.options import LauncherOptions, SlurmOptions, read_launcher_options
from benchmarks.launch.points import Point, Rerun, plan_point, records_of, still_to_run
from benchmarks.launch.running import (
    LaunchError,
    Sweep,
    SweepProgress,
    one_by_one,
    refuse,
    say,
    say_outcome,
)
from benchmarks.launch.slurm import submit
from benchmarks.launch.slurm.script import EXTRA_STEPS
from benchmarks.records.metrics import memory_text
from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import differences, flat_spec
from benchmarks.specification import SpecError
from benchmarks.specification import progress as bars
from benchmarks.specification.command import check_writable
from benchmarks.specification.run_spec import RunSpec, is_priced, spec_from_mapping
from zeropp.price import simulator

_RUN_KEYS = {
    *("launcher", "runs_dir", "report_dir", "rerun", "study", "verdict", "today"),
    *("sequences_per_gpu", "repeats", "retries", "points"),
}
_SPEC_KEYS = {field.name for field in fields(RunSpec)}
# Launchers that share the lock of the runs folder. Ranks of two sweeps on one machine would spoil
# each other's timings; two submissions, or a submission beside a local sweep, which has begun only
# the first of its points, would measure points twice.
_LOCKED = ("local", "trace", "replay", "slurm")
_MOST_RUNS = 1000  # of one point
_MOST_LEFT = 10  # lines on points that are under way


class Launcher(Protocol):
    """What the module of a launcher has. ``options`` are of its own type."""

    def check(self, points: Sequence[Point], options: Any, sweep: Sweep) -> None:
        """Raise SpecError, before anything is started or written, if a point cannot be launched."""

    def settle(self, runs_dir: Path) -> dict[str, str]:
        """Record the attempts that are over, and return the points under way, by id, with a line on
        each. Raises LaunchError if that cannot be known."""

    def launch(
        self, points: Sequence[Point], options: Any, runs_dir: Path, progress: SweepProgress
    ) -> list[RunRecord]:
        """Run points that have a plan, or submit them; returns the records of those that have
        ended."""


LAUNCHERS: Mapping[str, Launcher] = {
    "local": local,
    "slurm": submit,
    "trace": trace,
    "replay": replay,
    "simulate": simulate,
}


@contextmanager
def only_one(lock: Path, purpose: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the file ``lock`` inside this context, also against other hosts that share it: it is
    locked with flock, which NFS, Lustre and GPFS share between hosts, and which the kernel releases
    when the holder ends. If another process holds it, this says so once and waits. Raises OSError
    if the file cannot be written or locked."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = FileLock(lock, mode=0o666)
    try:
        file.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process, which {purpose} ({file.lock_file})")
        file.acquire()
    try:
        yield
    finally:
        file.release()


def announce(
    points: Sequence[Point],
    todo: Sequence[Point],
    failed: Sequence[RunRecord],
    launcher: str,
    under_way: Mapping[str, str],
) -> None:
    """Print how many points will run, of what has no success what became of it, and of the points
    to run what the tuner chose. Points that have a record already are only counted."""
    distinct = {point.spec.spec_id: point for point in todo}
    left = {
        p.spec.spec_id: under_way[p.spec.spec_id] for p in points if p.spec.spec_id in under_way
    }
    for note in dict.fromkeys(point.note for point in distinct.values() if point.note):
        bars.CONSOLE.print(note, soft_wrap=True, markup=False, highlight=False)
    line = f"{len(distinct)} of {len(points)} points to run with launcher={launcher}"
    if len(todo) > len(distinct):
        line += f", {len(todo)} runs in all"
    line += f", {len(left)} under way" if left else ""
    if others := under_way.keys() - {point.spec.spec_id for point in points}:
        line += f" (and {len(others)} that are not of this sweep: zeropp status, zeropp cancel)"
    if recorded := len(points) - len(distinct) - len(left):
        line += f", {recorded} already recorded (rerun=all runs them again)"
    if failed:
        counts = Counter(record.status for record in failed)
        line += f", of them {', '.join(f'{n} {status}' for status, n in counts.items())}"
        line += " (rerun=failed runs these)"
    bars.CONSOLE.print(line, soft_wrap=True)
    for record in failed:
        if record.status != "infeasible":
            say_outcome(record.status, record.spec_id, record.reason)
    for point in distinct.values():
        if point.plan is None:
            say_outcome("infeasible", point.spec.spec_id, point.reason)
    for spec_id, why in islice(left.items(), _MOST_LEFT):
        say(f"  left alone  {spec_id}: {why}")
    if len(left) > _MOST_LEFT:
        say(f"  left alone  {len(left) - _MOST_LEFT} more (zeropp status names them)")


def point_of(config: dict[str, Any]) -> Point:
    """The planned point of a composed configuration. Raises SpecError on bad input."""
    return plan_point(spec_of(config), simulated=config["launcher"].get("kind") == "simulate")


def spec_of(config: dict[str, Any]) -> RunSpec:
    """The spec in a composed configuration; raises SpecError for keys that are unknown."""
    if unknown := sorted(set(config) - _SPEC_KEYS - _RUN_KEYS):
        known = ", ".join(sorted(_SPEC_KEYS | _RUN_KEYS))
        raise SpecError(f"{unknown[0]}={config[unknown[0]]!r}: unknown key (known: {known})")
    values = {key: value for key, value in config.items() if key in _SPEC_KEYS}
    if (sequences := config.get("sequences_per_gpu")) is not None:
        if type(sequences) is not int or sequences < 1:
            raise SpecError(f"sequences_per_gpu={sequences!r}: must be a whole number, at least 1")
        gpus = values.get("num_gpus")
        values["global_batch"] = sequences * gpus if isinstance(gpus, int) else 1
    return spec_from_mapping(values)


def run_points(points: list[Point], configs: list[dict[str, Any]]) -> int:
    """Run the points that are missing, then write the report; returns 1 if a point failed, now or
    in an earlier call, else 0.

    If points wait in a queue and have no record yet, the last job of the sweep writes the report.
    """
    sweep = read_sweep(configs[0])
    try:
        records = launch_points(points, configs)
    except LaunchError as error:
        say(f"error: {error}")
        return 1
    if records is not None and all(any(records_of(p.spec, sweep.runs_dir)) for p in points):
        from benchmarks.report.write import write_report  # it imports pandas and matplotlib

        roots = dict.fromkeys(sweep.runs_dir / point.spec.spec_id for point in points)
        try:
            write_report(list(roots), sweep.report_dir)
        # The records exist, so the report can be made later.
        except SpecError as error:
            say(f"no report: {error}")
            return 1
        except OSError as error:
            say(f"no report: {error.filename or sweep.report_dir}: {error.strerror or error}")
            return 1
    return 0 if all(r.status in ("ok", "infeasible") for r in records or ()) else 1


def read_sweep(config: Mapping[str, Any]) -> Sweep:
    """What a composed configuration says of the whole sweep; raises SpecError."""
    if (rerun := config["rerun"]) not in get_args(Rerun):
        raise SpecError(f"rerun={rerun!r}: must be one of {', '.join(get_args(Rerun))}")
    numbers = {"repeats": config["repeats"], "retries": config.get("retries", 0)}
    for key, least in (("repeats", 1), ("retries", 0)):
        if type(numbers[key]) is not int or not least <= numbers[key] <= _MOST_RUNS:
            raise SpecError(
                f"{key}={numbers[key]!r}: must be a whole number from {least} to {_MOST_RUNS}"
            )
    return Sweep(Path(config["runs_dir"]), Path(config["report_dir"]), rerun, **numbers)


def launch_points(points: list[Point], configs: list[dict[str, Any]]) -> list[RunRecord] | None:
    """Run the points that are missing, launcher by launcher, and record those that are infeasible.
    Returns the new records and those of earlier failures that stand, or None for a dry run, which
    writes nothing. Raises SpecError, before anything is written, if a launcher refuses a point or
    an option, and LaunchError if it does not know what is under way."""
    sweep, groups = read_sweep(configs[0]), _by_launcher(points, configs)
    _refuse_what_makes_no_point(points, configs)
    if repeated := len(points) - sum(len(group) for _, group in groups):
        say(f"{repeated} of {len(points)} points repeat others of the sweep, and run only once")
    for options, group in groups:
        LAUNCHERS[options.kind].check(group, options, sweep)
    dry = [(options, group) for options, group in groups if options.dry_run]
    for options, group in dry:
        _launch_missing(group, options, sweep)
    if dry:
        return None
    check_writable("runs_dir", sweep.runs_dir)
    check_writable("report_dir", sweep.report_dir)
    return [record for options, group in groups for record in _tried(group, options, sweep)]


def _refuse_what_makes_no_point(points: list[Point], configs: list[dict[str, Any]]) -> None:
    """Raise SpecError for a key that is swept, but would be read once: one of the whole sweep, or
    a launcher's option that records of one specification do not have."""
    of_sweep = _RUN_KEYS - {"launcher", "sequences_per_gpu"}
    alike = defaultdict[tuple[str, ...], list[dict[str, str]]](list)
    for point, config in zip(points, configs, strict=True):
        options = read_launcher_options(config["launcher"])
        group = (point.spec.spec_id, PROVENANCE[options.kind], options.variant)
        alike[group].append(
            {f"launcher.{k}": v for k, v in flat_spec(config["launcher"], "").items()}
        )
        alike[()].append(flat_spec({key: config[key] for key in of_sweep & config.keys()}))
    for differing in map(differences, alike.values()):
        for key in (key for words in differing for key in words):
            values = ",".join(dict.fromkeys(words.get(key, "none") for words in differing))
            raise SpecError(
                f"{key}={values}: is no part of a point, so one of them would run (give one value "
                "per command, with rerun=all for another run of the same points)"
            )


def _tried(group: list[Point], options: LauncherOptions, sweep: Sweep) -> list[RunRecord]:
    """The records of points that share a launcher's options. What ended from outside is tried
    again, as often as the sweep says."""
    records: list[RunRecord] = []
    for left in range(sweep.retries, -1, -1):
        lock = only_one(sweep.runs_dir / ".lock", "runs or submits points in this folder", say)
        before = {r.record_id for point in group for r in records_of(point.spec, sweep.runs_dir)}
        try:
            with lock if options.kind in _LOCKED else nullcontext():
                ended = _launch_missing(group, options, sweep)
        except OSError as error:  # nothing is known: every point counts as missing
            with SweepProgress(len(group)) as progress:
                ended = one_by_one(group, options.kind, progress, partial(_fail, error))
        if isinstance(options, SlurmOptions) and options.wait:
            ended = submit.wait(group, sweep.runs_dir, before)
        # Who has cancelled a job does not want it again.
        lost = {r.spec_id for r in ended if r.interrupted and "CANCELLED" not in r.reason}
        group = [point for point in group if point.spec.spec_id in lost]
        records += [r for r in ended if not left or r.spec_id not in lost]
        if not lost:
            break
        sweep = replace(sweep, rerun="missing")
    return records


def _fail(error: OSError, _: Point) -> RunRecord:
    raise error


def _launch_missing(group: list[Point], options: LauncherOptions, sweep: Sweep) -> list[RunRecord]:
    """Run what no record settles yet of points that share a launcher's options; returns the new
    records, and those of points that failed before and are not run again."""
    launcher = LAUNCHERS[options.kind]
    under_way: dict[str, str] = {} if options.dry_run else launcher.settle(sweep.runs_dir)
    free = [point for point in group if point.spec.spec_id not in under_way]
    todo, failed = still_to_run(
        free,
        sweep.runs_dir,
        provenance=PROVENANCE[options.kind],
        variant=options.variant,
        rerun=sweep.rerun,
        repeats=sweep.repeats,
    )
    announce(group, todo, failed, options.kind, under_way)
    if not options.dry_run:
        for point in todo:
            if point.plan is None:
                refuse(point, options, sweep.runs_dir, Ending("infeasible", point.reason))
    feasible = [point for point in todo if point.plan is not None]
    named = differences([flat_spec(point.spec.to_dict()) for point in feasible])
    for point, words in zip(feasible, named, strict=True) if options.dry_run else ():
        told = [*(f"{key}={value}" for key, value in words.items()), _expected(point)]
        say(f"  would run   {point.spec.spec_id}: {', '.join(told)}; {point.why}")
    if options.dry_run and not isinstance(options, SlurmOptions):
        return failed
    with SweepProgress(len(feasible)) as progress:
        try:
            return [*failed, *launcher.launch(feasible, options, sweep.runs_dir, progress)]
        except OSError as error:  # full, or of another user: these count as missing
            return [*failed, *one_by_one(feasible, options.kind, progress, partial(_fail, error))]


def _expected(point: Point) -> str:
    """What a run of a point would take, by the simulator, in a few words."""
    spec, plan = point.spec, point.plan
    assert plan is not None
    if spec.cluster.device.is_cpu or not is_priced(spec.cluster, spec.precision):
        return "of unknown duration"
    result = simulator.simulate(plan, spec.cluster)
    steps = spec.measure.warmup_steps + spec.measure.steps + EXTRA_STEPS
    hours = spec.num_gpus * steps * result.step_s / 3600
    gib = memory_text(result.peak_bytes / 2**30)
    return f"step {result.step_s:.3f} s, {gib}, {hours:.2g} GPU-hours of steps (simulated)"


def _by_launcher(
    points: list[Point], configs: list[dict[str, Any]]
) -> list[tuple[LauncherOptions, list[Point]]]:
    """Points grouped by equal launcher options, with equal points only once. Raises SpecError for
    an unknown launcher or option."""
    groups: dict[str, tuple[LauncherOptions, dict[str, Point]]] = {}
    for point, config in zip(points, configs, strict=True):
        options = read_launcher_options(config["launcher"])
        key = json.dumps(vars(options), sort_keys=True, default=str)
        groups.setdefault(key, (options, {}))[1].setdefault(point.spec.spec_id, point)
    return [(options, list(group.values())) for options, group in groups.values()]
