"""What a configuration of another program says, in this suite's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

from benchmarks.specification import SpecError
from zeropp.price.programs import Scaling

UNKNOWN = "not known here, left out"


@dataclass(kw_only=True)
class Reading:
    """What one file says. ``model``, ``knobs`` and ``settings`` have the keys of ``conf/``;
    ``traits`` are those of the contender's program (``zeropp.price.programs``) that the file
    switches.

    ``named`` are lines about what may change time or memory and has no price here, ``harmless`` are
    keys that change neither, and ``derived`` are lines about values that follow from others.
    """

    dialect: str
    contender: str
    model: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    traits: dict[str, Any] = field(default_factory=dict)
    free: str = ""  # the data-parallel knob that takes the ranks that the other degrees leave
    batch_per_replica: int | None = None  # where the global batch follows from it
    accumulates: int = 0  # microbatches of a step, where their size follows from the global batch
    unknown: str = ""  # a model whose sizes the words must give, and those that are known
    pads: int | None = None  # the vocabulary, to a multiple of this x TP; None: by the contender
    code: str = ""  # that of the model, a row of conf/eager_kernels.csv
    eager: bool = False  # it compiles nothing, although its contender does
    named: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)

    def slice_sequences(self, key: str, slices: int) -> None:
        """Note the context parallelism of a key."""
        self.knobs["context"] = slices
        if slices > 1:
            self.derived.append(
                f"{key}={slices}: simulated as ring attention (arXiv 2310.01889), unless the file "
                "says otherwise"
            )

    def multiply_in_8_bits(self, key: str, scaling: Scaling = "fused") -> None:
        """Note the 8-bit products of a key."""
        self.settings["precision"] = "fp8"
        self.traits["scaling"] = scaling
        self.derived.append(f"{key}: products of blocks in 8 bits, at their measured rate")


class Keys:
    """The keys of one file, which are taken one after the other; what is left was not
    understood."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key that this reader understands."""
        return self._left.pop(key, default)

    def given(self, key: str, default: Any = None) -> Any:
        """The same of a key that needs a value; raises SpecError where it stands alone."""
        value = self.take(key, default)
        if (value is True or value == "") and value is not default:
            raise SpecError(
                f"{key}: has no value (where it is a variable, set it: TP=4 zeropp "
                "explain ..., and the script's own arguments behind --; where a command prints "
                "it, write it into the script)"
            )
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = -inf,
        kind: Callable[[Any], Any] = int,
    ) -> Any:
        """The same as a whole number, or of another ``kind``; raises SpecError for another, or one
        below ``least``."""
        if (value := self.given(key)) is None:
            return default
        try:
            whole = kind is int and float(str(value)).is_integer()  # also of 5e8
            number = int(float(value)) if whole else kind(str(value))
        except ValueError:
            raise SpecError(
                f"{key}={value!r}: must be a {'whole ' * (kind is int)}number"
            ) from None
        if number < least:
            raise SpecError(f"{key}={number}: must be at least {least}")
        return number

    def names(self, key: str, default: Iterable[str] = ()) -> list[str]:
        """The same as a list of names, which may be one text with commas between them."""
        if not isinstance(value := self.take(key, default), (list, tuple)):
            return str(value).replace(",", " ").split()
        return [*map(str, value)]

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1, such as a size or a degree; raises SpecError where it is
        none, and where it is missing and has no ``default``."""
        if (number := self.number(key, default, least=1)) is None:
            raise SpecError(f"{key}: missing; it has no default (write it into the file)")
        return int(number)

    def sort_rest(
        self, reading: Reading, neutral: Mapping[str, tuple[Any, str]], harmless: Iterable[str]
    ) -> None:
        """Say of every key that is left whether it changes a price.

        ``neutral`` has the value with which a key changes nothing, or a tuple of such values, and
        what it changes otherwise;
        ``harmless`` are beginnings of keys that change nothing with any value, as null does for
        any key. All others are named as unknown.
        """
        beginnings = tuple(harmless)
        for key, value in self._left.items():
            nothing, why = neutral.get(key, (None, ""))
            setting = key if value is True else f"{key}={value}"
            values = nothing if isinstance(nothing, tuple) else (nothing,)
            if value is None or (value in values if why else key.startswith(beginnings)):
                reading.harmless.append(setting)
            else:
                reading.named.append(f"{setting}: {why or UNKNOWN}")
        self._left.clear()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def share_of_ranks(num_gpus: int, degrees: Mapping[str, int]) -> int:
    """The data-parallel degree that is left; raises SpecError if the others do not divide the
    GPUs."""
    product = prod(degrees.values())
    if num_gpus % product:
        words = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
        raise SpecError(
            f"num_gpus={num_gpus}: one replica of {words} takes {product} GPUs (give a multiple "
            f"of {product} as num_gpus)"
        )
    return num_gpus // product
