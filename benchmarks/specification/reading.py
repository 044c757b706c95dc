"""Turns plain values into types; every mistake of a user is a SpecError of one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from benchmarks.specification import CONF
from benchmarks.specification import SpecError as SpecError

T = TypeVar("T")

_made = lru_cache(TypeAdapter)  # making one takes milliseconds


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """pydantic's reader of a type."""
    return _made(kind)  # type: ignore[arg-type]  # types are hashable


def validated(kind: type[T], values: Any, prefix: str = "") -> T:
    """The values as a ``kind``. Raises SpecError with one line for the first mistake; ``prefix``
    stands before the name of its field."""
    try:
        made = adapter(kind).validate_python(values)
    except ValidationError as error:
        raise SpecError(_one_line(error, values, prefix)) from None
    _refuse_truth_as_number(values, made, prefix)
    return made


@lru_cache
def preset(group: str, name: str, kind: type) -> Any:
    """The file ``conf/<group>/<name>.yaml`` as a ``kind``; raises SpecError if there is none."""
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (CONF / group).glob("*.yaml")))
        raise SpecError(f"{group}={name!r}: no such preset in conf/{group} (known: {known})")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{group}={name}: not a YAML file: {' '.join(str(error).split())}"
        ) from None
    return validated(kind, values, group)


def beside_preset(group: str, used: Any) -> dict[str, Any]:
    """The fields of a ``used`` model or cluster that its preset, the file of its name, has
    otherwise, as a nested mapping; empty if no file has its name."""
    with suppress(SpecError):
        return _otherwise(asdict(used), asdict(preset(group, used.name, cast("Any", type(used)))))
    return {}


def _otherwise(used: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _otherwise(value, old) if isinstance(value, dict) and isinstance(old, dict) else value
        for name, value in used.items()
        if value != (old := known.get(name))
    }


def flat(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """A nested mapping as words of a command line: ``model.seq=32768``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}={'null' if value is None else value}"


def _refuse_truth_as_number(values: Any, made: Any, field: str) -> None:
    """Raise SpecError where a number was made of true or false, as pydantic does."""
    if isinstance(values, bool) and not isinstance(made, bool):
        raise SpecError(f"{field}={values}: must be a number")
    if isinstance(values, Mapping):
        for key, value in values.items():
            inner = getattr(made, str(key), value)
            _refuse_truth_as_number(value, inner, f"{field}.{key}" if field else str(key))


def _one_line(error: ValidationError, values: Any, prefix: str) -> str:
    problems = error.errors(include_url=False)
    first, path = problems[0], _path(problems[0]["loc"], values)
    field = ".".join([prefix] * bool(prefix) + path)
    if first["type"] == "unexpected_keyword_argument":
        return f"{field}={first['input']!r}: unknown key"
    if first["type"] == "missing":
        return f"{field}: missing; it has no default"
    same = [p["msg"].removeprefix("Value error, ") for p in problems]
    same = [m for m, p in zip(same, problems, strict=True) if _path(p["loc"], values) == path]
    return f"{field}={first['input']!r}: {'; or '.join(dict.fromkeys(same)).lower()}"


def _path(location: tuple[int | str, ...], values: Any) -> list[str]:
    """The keys of a location of pydantic's, without the names of union members at its end."""
    path = []
    for part in location:
        if not isinstance(values, Mapping):
            break
        path.append(str(part))
        values = values.get(part)
    return path
