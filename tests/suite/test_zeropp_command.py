"""The command ``zeropp``: the suite's commands by one name, and their help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import hydra
import pytest
import yaml

from benchmarks import CHECKOUT
from benchmarks.specification import SpecError
from benchmarks.specification.compose import compose
from zeropp import __main__ as command

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))


def call(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """The exit status of a command line, and what it printed on both streams."""
    monkeypatch.setattr(sys, "argv", line.split())
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return command.main(), *capsys.readouterr()


def test_every_command_is_named_and_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed, _ = call("zeropp", monkeypatch, capsys)
    assert status == 0
    assert all(f"  {name} " in printed for name in command.COMMANDS)
    status, printed, _ = call("zeropp show schedule ranks=2", monkeypatch, capsys)
    assert status == 0
    assert printed.startswith("rank 0")
    assert call("zeropp explian", monkeypatch, capsys)[0] == 2
    assert call("zeropp explain /nowhere", monkeypatch, capsys)[0] == 2


def test_a_wheel_offers_what_needs_no_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "IN_WHEEL", True)
    assert list(command.offered()) == ["tune", "explain", "show"]
    assert call("zeropp run", monkeypatch, capsys) == (
        2,
        "",
        "error: run: needs a checkout (see zeropp --help)\n",
    )


def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.show", None)
    with pytest.raises(ModuleNotFoundError):  # a part of this project is a mistake of ours
        call("zeropp show", monkeypatch, capsys)
    monkeypatch.delitem(sys.modules, "benchmarks.show")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    status, _, error = call("zeropp show", monkeypatch, capsys)
    assert status == 2
    assert re.fullmatch(r"error: rich.console is not installed for .*pip install .*\n", error)


def test_one_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    current = PROJECT["project"]["version"]
    assert f"\nversion: {current}\n" in (CHECKOUT / "CITATION.cff").read_text("utf-8")
    changes = (CHECKOUT / "CHANGELOG.md").read_text("utf-8")
    assert changes.startswith(f"# Changes\n\n## {current}\n")
    status, printed, _ = call("zeropp --version", monkeypatch, capsys)
    assert (status, printed) == (0, f"zeropp {version('zeropp')}\n")


def test_help_is_one_screen_and_help_all_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    for config in ("config", "tune"):
        assert compose(config, ["--help"]) == []
        screen = capsys.readouterr().out
        assert len(screen.splitlines()) <= 40
        assert compose(config, ["--help", "all"]) == []
        assert "kv_heads:" in capsys.readouterr().out
        assert "kv_heads:" not in screen


def test_the_wheel_has_what_its_commands_read() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert all((CHECKOUT / path).exists() for path in wheel["only-include"])
    packages = {"zeropp", "baselines", "benchmarks"}
    roots = {path.partition("/")[0] for path in wheel["only-include"]}
    assert wheel["sources"] == {root: f"zeropp/data/{root}" for root in roots - packages}


def test_a_wheel_answers_without_a_checkout(tmp_path: Path) -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    for path in wheel["only-include"]:
        root, _, rest = path.partition("/")
        target = tmp_path / wheel["sources"].get(root, root) / rest
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (CHECKOUT / path).is_dir() else shutil.copy
        copy(CHECKOUT / path, target)
    words = "explain docs/examples/llama3_8b.toml num_gpus=16 cluster=h100 --measured 9000ms"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zeropp", *words.split()],
        capture_output=True, text=True, timeout=300, cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "times simulated" in done.stdout


@pytest.mark.parametrize("text", ["name: [1,", "name: \x01x"])
def test_a_preset_that_is_no_yaml_ends_with_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hydra, "compose", lambda *_: yaml.safe_load(text))
    with pytest.raises(SpecError) as error:
        compose("config", ["num_gpus=2"])
    assert "\n" not in str(error.value)
    assert "unicode string" in str(error.value)  # where a file's name stands
