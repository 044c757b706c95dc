"""The suite from Python: points run, records loaded, the paper's table as numbers and text."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks import CHECKOUT, api

DEMO = CHECKOUT / "results" / "reference" / "demo"
POINTS = (
    "-m model=gpt_tiny num_gpus=2,4 cluster=a800 precision=bf16 data=synthetic launcher=simulate "
    "contender=zeropp,deepspeed_3d sequences_per_gpu=4"
)


def test_points_run_once_and_weak_scaling_is_one_sweep(tmp_path: Path) -> None:
    frame = api.run(POINTS, runs_dir=tmp_path)
    assert len(frame) == 4
    assert (frame["global_batch"] == 4 * frame["num_gpus"]).all()
    assert set(frame["evidence"]) == {"simulated"}
    records = sorted(tmp_path.rglob("record.json"))
    assert len(api.run(POINTS, runs_dir=tmp_path)) == 4
    assert sorted(tmp_path.rglob("record.json")) == records
    names = [picture.name for picture in api.figures(frame, "Scaling")]
    assert names == ["scaling_weak_simulated_a800"]
    assert {path.name for path in tmp_path.iterdir()} == set(frame["spec_id"])


def test_ctrl_c_works_again_after_it_has_ended_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the local launcher does
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("benchmarks.launch.sweep.launch_points", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            api.run(POINTS, runs_dir=tmp_path)
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_frame_is_tidy_and_numeric() -> None:
    frame = api.load(DEMO)
    numbers = ["step_s", "step_s_low", "tokens_per_s_per_gpu", "mfu", "peak_gib", "parameters"]
    assert all(frame[name].dtype.kind == "f" for name in numbers)
    assert frame["mfu"].isna().all()  # a CPU has no known peak
    assert frame["parameters"].is_monotonic_increasing
    paper = api.paper_table(frame)
    assert len(frame) == 10
    assert len(paper) == 4  # the fastest configuration of each contender
    assert list(paper[paper["contender"] == "deepspeed"]["speedup"]) == [1.0] * 2
    text = api.paper_markdown(frame)
    few = api.paper_markdown(frame, columns=["speedup"])
    assert few.startswith("**Throughput and peak memory on CPU (gloo), measured**")
    assert ("MiB |" in text, "MiB |" in few, "speed-up |" in few) == (True, False, True)
    assert all(f"{value:,.0f}" in text for value in paper["tokens_per_s_per_gpu"])
    assert r"\toprule" in api.paper_latex(frame)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: api.load("/nowhere"), "/nowhere: no such file"),
        (lambda: api.run("num_gpu=4"), "did you mean num_gpus"),
        (lambda: list(api.figures(api.load(DEMO), "Magic")), "section='Magic': must be one of"),
    ],
)
def test_bad_input_is_one_line(call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(api.SpecError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
