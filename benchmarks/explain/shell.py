"""Finds the arguments of Megatron-LM in what people have: a shell script, a command line, the YAML
of its tests, or the list that a run prints into its log.

Nothing of a script is executed. Assignments, arrays and ``if`` with comparisons of strings are
followed; a script that chooses between models (``case``) is refused, since it is not one
configuration.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from benchmarks.specification import SpecError

_VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::?-([^}]*))?\}|\$\(\(([^)]*)\)\)|\$(\w+)")
_WHOLE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_ARRAY = re.compile(r"\s*(?:export\s+|declare\s+-a\s+)?(\w+)(\+?)=\((.*)\Z", re.DOTALL)
_PLAIN = re.compile(r"\s*(?:export\s+|local\s+)?(\w+)(\+?)=(.*)\Z", re.DOTALL)
_RUNS = re.compile(r"\.py\b|\b(torchrun|python3?|srun)\b|^\s*--")
_LOGGED = re.compile(r"^\s*(?:\[.*?\]:?\s*|\d+:\s*)?(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)

Arguments = dict[str, Any]  # a flag's value: True for a flag alone, a text, or several texts


def arguments_of(words: list[str]) -> Arguments:
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
    values = {f"--{name.replace('_', '-')}": value for name, value in _LOGGED.findall(text)}
    given = {flag: value for flag, value in values.items() if value not in ("None", "False", "[]")}
    return {flag: True if value == "True" else value for flag, value in given.items()}


def arguments_of_script(text: str) -> tuple[Arguments, int | None]:
    """(the flags after ``pretrain_*.py`` or at the beginning, GPUs of its ``torchrun``).

    Raises SpecError if there are none, or if the script is not one configuration.
    """
    variables: dict[str, list[str]] = {}
    launch: list[str] = []
    for line in _lines_that_run(text, variables):
        if array := _ARRAY.match(line):
            name, more, body = array.groups()
            kept = variables.get(name, []) if more else []
            variables[name] = kept + _words(body.rsplit(")", 1)[0], variables)
        elif assigned := _PLAIN.match(line):
            name, more, value = assigned.groups()
            kept = variables.get(name, []) if more else []
            variables[name] = [*kept, " ".join(_words(value, variables))]
        elif _RUNS.search(line):
            words = _words(line, variables)
            if any(word.startswith("--") for word in words):
                launch = words
    if not launch:  # a file that only defines arguments, which another script reads
        texts = [" ".join(value) for value in variables.values()]
        launch = [word for text in texts if "--num-layers" in text for word in text.split()]
    if not launch:
        raise SpecError(
            "no line runs a Python file with arguments (give the command line that the script "
            "runs, or the list of arguments from the log of a run)"
        )
    program = next((i for i, word in enumerate(launch) if word.endswith(".py")), -1)
    return arguments_of(launch[program + 1 :]), _world(arguments_of(launch[: max(program, 0)]))


def _world(launcher: Arguments) -> int | None:
    """The number of GPUs in torchrun's own arguments."""
    spelled = {flag.replace("-", "_").lstrip("_"): value for flag, value in launcher.items()}
    ranks_per_node, nodes = spelled.get("nproc_per_node", ""), spelled.get("nnodes", "1")
    if str(ranks_per_node).isdigit() and str(nodes).isdigit():
        return int(ranks_per_node) * int(nodes)
    return None


def _lines_that_run(text: str, variables: dict[str, list[str]]) -> Iterator[str]:
    """The logical lines of a script that run: continuations joined, comments left out, and of an
    ``if`` only the branch that its own assignments choose. An unknown condition is false."""
    branches: list[tuple[bool, bool]] = []  # (this branch runs, an earlier one has run)
    for line in _joined(text):
        word = line.split(maxsplit=1)[0]
        if word == "case":
            raise SpecError(
                "case: the script chooses between models, so it is not one configuration (give "
                "the command line that it runs)"
            )
        if word == "if":
            holds = _holds(line, variables)
            branches.append((holds, holds))
        elif word == "elif" and branches:
            done = branches[-1][1]
            branches[-1] = (not done and _holds(line, variables), done or _holds(line, variables))
        elif word == "else" and branches:
            branches[-1] = (not branches[-1][1], True)
        elif word in ("fi", "fi;") and branches:
            branches.pop()
        elif all(runs for runs, _ in branches):
            yield line


def _joined(text: str) -> Iterator[str]:
    """Lines without comments, joined where they end in a backslash or inside an array."""
    waiting = ""
    for raw in text.splitlines():
        line = re.sub(r"(^|\s)#(?!!).*$", "", raw) if not waiting.endswith("'") else raw
        line = "" if line.startswith("#!") else line
        joined = f"{waiting}{line.strip()}"
        if joined.endswith("\\"):
            waiting = joined[:-1] + " "
        elif _ARRAY.match(joined) and not joined.endswith(")"):
            waiting = joined + " "
        else:
            waiting = ""
            if joined.strip():
                yield joined


def _words(text: str, variables: dict[str, list[str]]) -> list[str]:
    """The words of a line with its variables replaced; ``"--flag value"`` is two words."""
    try:
        split = shlex.split(text.strip().rstrip(";"), posix=True)
    except ValueError:
        split = text.split()
    replaced: list[str] = []
    for word in split:
        if (whole := _WHOLE.fullmatch(word)) and whole[1] in variables:
            replaced += [part for value in variables[whole[1]] for part in _parts(value)]
        else:
            replaced += _parts(_replaced(word, variables))
    return replaced


def _parts(word: str) -> list[str]:
    if not word.startswith("--") or " " not in word:
        return [word]
    return shlex.split(word)


def _replaced(word: str, variables: dict[str, list[str]]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default, arithmetic, bare = match.groups()
        if arithmetic:
            return _product(arithmetic, variables)
        known = variables.get(name or bare)
        if known is not None:
            return " ".join(known)
        return (default or "").strip("\"'") if name else ""

    return _VARIABLE.sub(value, word)


def _product(text: str, variables: dict[str, list[str]]) -> str:
    """The value of ``A * B``; empty if it is anything else."""
    product = 1
    for factor in text.split("*"):
        number = " ".join(variables.get(factor.strip().lstrip("$"), [factor.strip()]))
        if not number.isdigit():
            return ""
        product *= int(number)
    return str(product)


def _holds(line: str, variables: dict[str, list[str]]) -> bool:
    """Whether the condition of an ``if`` holds: comparisons of texts, joined by ``||`` or
    ``&&``."""
    condition = re.sub(r"^(if|elif)\s+|;?\s*then\s*$", "", line.strip())
    any_of = [part.split("&&") for part in condition.split("||")]
    return any(all(_test(test, variables) for test in tests) for tests in any_of)


def _test(test: str, variables: dict[str, list[str]]) -> bool:
    inner = test.strip().removeprefix("[[").removeprefix("[").removesuffix("]]").removesuffix("]")
    words = [_replaced(word, variables) for word in shlex.split(inner.strip())]
    match words:
        case ["-z", value]:
            return not value
        case ["-n", value]:
            return bool(value)
        case [left, "==" | "=", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
    return False
