"""How well the cost model's matrix products agree with measured ones, by device; writes nothing.

``results/published/product_times.csv`` has the kernels' times of the four products of a block of
six models, 512 to 4,096 tokens and tensor parallelism of 1 to 8, as Vidur profiled them. The first
line of each device is for the constants of its preset. The other lines are for the reached rate
(TFLOP/s) and the fixed time per kernel that fit best with a given share of the time to write the
output that arithmetic does not hide (``exposed_output``): lines that are equally good say that
these times do not tell that share.

    python -m benchmarks.studies.product_times
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks import CHECKOUT
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.reading import preset
from zeropp.cluster import Cluster, Device
from zeropp.price.kernels import matmul_s

TABLE = CHECKOUT / "results" / "published" / "product_times.csv"
_SHARES = (0.0, 0.3, 0.6, 0.9, 1.2)
_KERNEL_US = (0.0, 2.0, 4.0, 6.0)
_RATES = {"a100": range(225, 275, 5), "h100": range(620, 820, 12)}  # TFLOP/s


@dataclass(frozen=True)
class Product:
    """A measured product of [m, k] and [k, n] in 16 bits."""

    m: int
    k: int
    n: int
    measured_s: float


def products_on(device: str) -> list[Product]:
    """The measured products of a device."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [
            Product(int(row["m"]), int(row["k"]), int(row["n"]), 1e-3 * float(row["value"]))
            for row in csv.DictReader(file)
            if row["device"] == device
        ]


def errors(device: Device, measured: Sequence[Product]) -> np.ndarray:
    """The absolute relative errors of the device's products."""
    return np.array(
        [abs(matmul_s(device, "bf16", m=p.m, k=p.k, n=p.n) / p.measured_s - 1) for p in measured]
    )


def best(device: Device, measured: Sequence[Product], share: float) -> Device:
    """The device with the rate and the fixed time whose errors are smallest in the mean."""
    choices = [
        replace(device, matmul_bf16_tflops=float(rate), kernel_us=fixed, exposed_output=share)
        for rate, fixed in product(_RATES[device.name], _KERNEL_US)
    ]
    return min(choices, key=lambda choice: float(errors(choice, measured).mean()))


@dataclass(frozen=True)
class Fit:
    """Constants of a device, and the errors of its measured products with them."""

    device: Device
    products: int
    median: float
    p90: float


def fits(name: str) -> list[Fit]:
    """The preset's constants, then the best ones with each share of exposed output."""
    device, measured = preset("cluster", name, Cluster).device, products_on(name)
    candidates = [device, *(best(device, measured, share) for share in _SHARES)]
    candidate_errors = [errors(candidate, measured) for candidate in candidates]
    return [
        Fit(candidate, len(measured), float(np.median(error)), float(np.percentile(error, 90)))
        for candidate, error in zip(candidates, candidate_errors, strict=True)
    ]


@command
def main() -> int:
    """Print a table per device; see ``--help``."""
    CommandParser(
        prog="python -m benchmarks.studies.product_times",
        description="Hold the cost model's matrix products against measured ones. Writes nothing.",
    ).parse_args()
    print("device  products  exposed_output  TFLOP/s  kernel_us  median   p90")
    for fit in (fit for name in _RATES for fit in fits(name)):
        device = fit.device
        print(
            f"{device.name:6}  {fit.products:8}  {device.exposed_output:14}  "
            f"{device.matmul_bf16_tflops:7g}  {device.kernel_us:9}  "
            f"{fit.median:6.1%}  {fit.p90:5.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
