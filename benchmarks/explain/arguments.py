"""Finds the arguments of Megatron-LM in what people have: a shell script, a command line, or the
list that a run prints into its log.

Bash itself expands a script (``expand.bash``), so arrays, ``+=``, ``case`` and functions mean what
they mean in a run. It is restricted, finds no command but those that cut texts (``_FILTERS``),
writes no file, has 10 s, and no network where the system has user namespaces. Variables that a
script takes from its caller are those of this process; those that Slurm sets follow from its
``#SBATCH`` lines (sbatch(1), "output environment variables").
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.specification import SpecError

# What reads a script's own arguments, or another file that may.
_TAKES_OWN = re.compile(
    r"\$\{?[@*#1-9]|\bshift\b|\bgetopts\b|\bfor \w+ *(;|$)|^ *(source|\.) ", re.MULTILINE
)
_LOGGED = re.compile(r"^\s*(?:\[.*?\]:?\s*|\d+:\s*)?(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
_PRELUDE = Path(__file__).with_name("expand.bash")
_LIMIT_S = 10
_FILTERS = ("cut", "tr")  # they print, and do nothing else; tail may wait for ever
_ASKED = {"nvidia-smi", "rocm-smi", "amd-smi"}
_READERS = {"head", "tail", "sed", "awk", "grep", "xargs"}  # of files, beside the script
# A restricted bash keeps ENV for itself, which scripts use as a name of their own. What it reads is
# a copy; the script's own place is in BASH_SOURCE_ (expand.bash).
_KEPT = re.compile(r"(?<![\w./-])ENV(?==)|(?:(?<=\$)|(?<=\$\{))(?:ENV|BASH_SOURCE)\b")
_AGAINST = {  # what a log says, and the flag that switches it off
    "add_bias_linear": "--disable-bias-linear",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
}
_OF_A_MODEL = {"--num-layers", "--hidden-size"}
_PLACEHOLDER = re.compile(r"(?<!<)<[A-Z][A-Za-z]+ [^<>\n|&;]+>")  # such as <PATH TO DATA>
# A whole group's output into a file, which a restricted bash would not run.
_TO_FILE = re.compile(
    r"((?:^|[\s;])(?:\}|\)|done|fi|esac))(?:[ \t]*\d?&?>[>|&]?[ \t]*(?![(>])"
    r"""(?:"[^"\n]*"|'[^'\n]*'|\$\([^()\n]*\)|`[^`\n]*`|\$\{[^}\n]*\}|[^\s;&|()"'`])+)+""",
    re.MULTILINE,
)
# Names of Megatron's programs that train no decoder-only model, or train nothing.
_OTHER_PROGRAM = re.compile(
    r"bert|_t5|retro|vlm|video|sora|generat|infer|quantiz|convert|server|eval"
)
_DIRECTIVE = re.compile(r"^#SBATCH\s+([^#\n]*)", re.MULTILINE)
_SHORT = {"-N": "nodes", "-n": "ntasks", "-G": "gpus", "-np": "ntasks", "-nnodes": "nodes"}
_COUNTS = "nnodes num_nodes nodes nproc_per_node num_gpus gpus_per_node num_processes gpus ntasks"
# A variable behind its dollar, also in arithmetic, and an argument of the script.
_VARIABLE = r"(?:\(\([^)A-Za-z_]*)?\$?\{?([A-Za-z_]\w*|\d)"
_COUNTED = {*_COUNTS.split(), "ntasks_per_node"}

Arguments = dict[str, Any]  # a flag's value: True for a flag alone, a text, or several texts


def arguments_of(words: Sequence[str]) -> Arguments:
    """Flags with their values, as argparse would read them; ``--flag=value`` is the same."""
    arguments: Arguments = {}
    flag = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            arguments[flag] = value if equals else True
        elif flag and arguments[flag] is True:
            arguments[flag] = word
        elif flag:
            arguments[flag] = f"{arguments[flag]} {word}"
    return arguments


def arguments_of_log(text: str) -> Arguments:
    """The flags of the list that Megatron prints when it starts, which has every default; empty
    if the text has no such list."""
    if "- arguments -" not in text:
        return {}
    logged = dict(_LOGGED.findall(text))
    switched = {flag: logged.pop(name, "") == "False" for name, flag in _AGAINST.items()}
    values = {f"--{name.replace('_', '-')}": value for name, value in logged.items()}
    values |= {flag: "True" for flag, off in switched.items() if off}
    given = {flag: value for flag, value in values.items() if value not in ("None", "False", "[]")}
    return {flag: True if value == "True" else value for flag, value in given.items()}


def _started(commands: Sequence[list[str]]) -> list[tuple[list[str], Arguments]]:
    """The commands that start a program with flags, and these flags."""
    launches = [words for words in commands if any(w.endswith(".py") for w in words)]
    alone = [words for words in commands if words[0].startswith("--")]
    if launches and alone:
        raise SpecError(
            f"{alone[0][0]}: begins a command of its own, which no training gets (is there a blank "
            "behind the backslash of the line before it?)"
        )
    return [
        (words, given)
        for words in (*launches, *alone)
        if (given := arguments_of(words[_program(words) + 1 :]))
    ]


def arguments_of_script(
    text: str, folder: Path, num_gpus: int | None = None, own: Sequence[str] = ()
) -> tuple[Arguments, int | None, list[str]]:
    """(the flags of the training that a script starts, the GPUs that it starts on, lines about what
    was not followed). ``folder`` has the files that the script sources; ``num_gpus``, if it is
    given, decides the number of Slurm's nodes; ``own`` are the script's own arguments, ``$1`` ...

    Raises SpecError if it starts none.
    """
    if own and not _TAKES_OWN.search(text):
        raise SpecError(
            f"{own[0]}: the script takes no arguments of its own (set its variables: TP=4 zeropp "
            "explain ..., or use words such as contender.tp=4)"
        )
    allocated = _sizes(_DIRECTIVE.findall(text))
    text, variables = _PLACEHOLDER.sub("unset", text), _slurm_variables(allocated, num_gpus)
    for written in dict.fromkeys((text, _TO_FILE.sub(r"\1", text))):
        commands, complaint = _expanded(written, folder, own, variables)
        started = _started(commands)
        of_models = [pair for pair in started if _OF_A_MODEL & set(pair[1])]
        sizes = [given.get(flag) for _, given in of_models[-1:] for flag in _OF_A_MODEL]
        if sizes and not {"", True} & {*sizes}:
            break
    if not of_models:
        last = [
            f"; {words[_program(words)]} has no --num-layers"
            for words, _ in started
            if _program(words) >= 0
        ][-1:]
        raise SpecError(
            "no line runs a training of Megatron-LM"
            + (f" (bash: {complaint})" if complaint else "")
            + "".join(last)
            + "; give Megatron-LM's arguments after --, or the log of a run (NeMo's words, such as "
            "model.num_layers=40, are not read); of torchtitan its TOML; of Megatron-Bridge the "
            "run_config.yaml that cfg.to_yaml writes; of Hugging Face's Trainer the config.json "
            "with the file of DeepSpeed or Accelerate; of another FSDP with contender=fsdp"
        )
    named = [*dict.fromkeys(_not_followed(commands, folder))]
    launch, arguments = of_models[-1]
    if any(words != launch for words, _ in of_models):
        named.append(f"the script starts {len(of_models)} trainings: this is the last of them")
    program = Path(launch[max(_program(launch), 0)]).name
    if _OTHER_PROGRAM.search(program):
        raise SpecError(
            f"{program}: no training of a decoder-only model (give one of pretrain_gpt)"
        )
    before = commands[: commands.index(launch)]
    outer = [words for words in before if words[-1] == "-c"][-1:]  # srun ... sh -c "python ..."
    launchers = [" ".join(words) for words in (*outer, launch[: max(_program(launch), 0)])]
    if num_gpus is None:
        _check_counts(launchers, text)
    return arguments, _world(allocated | _sizes(launchers)), named


def _not_followed(commands: Iterable[list[str]], folder: Path) -> Iterator[str]:
    """What a script's commands would have given that is not known here."""
    asked = set[str]()
    for words in commands:
        if words[0] in ("source", "cat"):
            yield f"{words[0]} {words[1]}: not found beside the script, so not followed"
        elif words[0] in _ASKED or (words[0] in _READERS and (folder / words[-1]).is_file()):
            asked.add(words[0])
        elif words == ["exit", "1"]:
            yield "exit 1: a check of the script fails here, and was passed over"
    for name in sorted(asked):
        yield f"{name}: not run here, and what hangs on its answer may differ"


def _check_counts(launchers: Iterable[str], text: str) -> None:
    """Raise SpecError for a launcher's number of nodes or GPUs that has no value, by the name of
    the variable that the script takes it from."""
    for line in launchers:
        for flag, value in arguments_of(line.split()).items():
            has_value = re.match(r"(auto|cpu|gpu|all)\b|\S*[1-9]", str(value))
            if _SHORT.get(flag, flag.lstrip("-").replace("-", "_")) not in _COUNTED or has_value:
                continue
            name, values = "", list[str]()
            found = re.search(rf"{flag}[ =]+[\"']?(\${_VARIABLE})", text)
            while found and found[2] != name:
                name = found[2]
                values = re.findall(rf"\b{name}=[\"']?(.*)", text)
                found = re.match(rf"(\${_VARIABLE})", values[0]) if len(values) == 1 else None
            way = f", or set it: {name}=2 zeropp explain ..., and arguments behind --"
            raise SpecError(
                f"{flag}: {f'${name} is not set' if name else 'has no value'} (give num_gpus=N"
                f"{way if name and (found or not values) else ''})"
            )


def _program(words: Sequence[str]) -> int:
    """The place of the Python file in the words of a command, -1 if there is none."""
    return next((place for place, word in enumerate(words) if word.endswith(".py")), -1)


def _expanded(
    text: str, folder: Path, own: Sequence[str], variables: Mapping[str, str]
) -> tuple[list[list[str]], str]:
    """(the words of every command that the script would run, the last complaint of bash)."""
    bash, unshare = shutil.which("bash"), shutil.which("unshare")
    if bash is None:
        raise SpecError("bash is not installed here: give the arguments after --")
    alone = [unshare, "--map-root-user", "--net"] if unshare else []
    if alone and subprocess.run([*alone, bash, "-c", ":"], capture_output=True).returncode:
        alone = []
    with tempfile.TemporaryDirectory() as place:
        script, told, said = (Path(place, name) for name in ("script.sh", "told", "said"))
        script.write_text(_KEPT.sub(r"\g<0>_", text), encoding="utf-8")
        variables = {**variables, "ENV_": os.environ.get("ENV", "")}
        found = Path(place, "commands")
        found.mkdir()
        for name in _FILTERS:
            if own_path := shutil.which(name):
                (found / name).symlink_to(own_path)
        with told.open("wb") as output, said.open("wb") as errors:
            shell = subprocess.Popen(
                [*alone, bash, "-r", str(script), *own],
                env={**variables, **os.environ, "BASH_ENV": str(_PRELUDE), "PATH": str(found)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                shell.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise SpecError(
                    f"bash has not ended after {_LIMIT_S} s: the script waits for something; give "
                    "the arguments after --"
                ) from None
            finally:  # with what it has started
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
        faults = re.findall(r": (line \d+: .*)", said.read_text(encoding="utf-8", errors="replace"))
        commands = told.read_bytes().decode("utf-8", "replace").split("\0\1\0")
    words = [[word for word in command.split("\0") if word] for command in commands]
    return [command for command in words if command], (faults or [""])[-1]


def _sizes(lines: Iterable[str]) -> dict[str, int]:
    """The numbers of nodes, tasks and GPUs in the words of Slurm or of launchers, the last of
    each."""
    sizes: dict[str, int] = {}
    for line in lines:
        words = re.sub(r"(?<!\S)(-[NnG])(?=\d)", r"\1 ", line).split()
        for flag, value in arguments_of(words).items():
            name = _SHORT.get(flag, flag.lstrip("-").replace("-", "_"))
            last = re.match(r"(?:\S*[:-])?(\d+)(?:\s|$)", str(value))  # gpu:a100:8, and 2-4 nodes
            if last and (name != "gres" or "gpu" in str(value)):
                sizes[name] = int(last[1])
    return sizes


def _slurm_variables(sizes: Mapping[str, int], num_gpus: int | None) -> dict[str, str]:
    """The variables that Slurm would set for a job of these sizes."""
    per_node, tasks = _gpus_per_node(sizes), sizes.get("ntasks_per_node", 1)
    nodes = num_gpus // per_node if num_gpus and per_node else sizes.get("nodes", 1)
    values = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NODEID": 0, "PROCID": 0, "LOCALID": 0}
    values |= {"NTASKS_PER_NODE": tasks, "NTASKS": sizes.get("ntasks", nodes * tasks), "JOB_ID": 1}
    values |= {"GPUS_PER_NODE": per_node, "GPUS_ON_NODE": per_node} if per_node else {}
    return {f"SLURM_{name}": str(value) for name, value in values.items()} if sizes else {}


def _gpus_per_node(sizes: Mapping[str, int]) -> int | None:
    """Of Slurm's words for them, or of ``torchrun``, ``deepspeed`` and ``accelerate launch``."""
    names = ("nproc_per_node", "num_gpus", "gpus_per_node", "gres")
    return next((sizes[name] for name in names if sizes.get(name)), None)


def _world(sizes: Mapping[str, int]) -> int | None:
    """The number of GPUs of a job of these sizes; None if they do not say it."""
    nodes = sizes.get("nnodes") or sizes.get("num_nodes") or sizes.get("nodes")
    per_node, tasks = _gpus_per_node(sizes), sizes.get("ntasks_per_node")
    by_node = (nodes or 1) * per_node if per_node else None
    by_task = nodes * tasks if nodes and tasks else None
    # Of a container, --gpus are those of a node.
    whole = sizes.get("num_processes") or (nodes and by_node) or sizes.get("gpus")
    return whole or by_node or sizes.get("ntasks") or by_task
