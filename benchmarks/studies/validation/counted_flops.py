"""FLOPs as the source of a row counts them, and the peak of which its utilisation is a share.

The formulas are those of arXiv 2104.04473 (eq. 3) and 2205.05198 (appendix). Attention counts in
full, or half if the row's source counts only the causal half.
"""

from __future__ import annotations

from benchmarks.studies.validation.rows import PublishedRow, UnpredictableError
from zeropp.cluster import Device
from zeropp.cost import model_flops_per_token
from zeropp.cost.flops import block_forward_flops


def flops_per_token(row: PublishedRow) -> float:
    """FLOPs per token of one step, with those of recomputation if the row's metric has them."""
    shape = row.shape
    attention = 4 * shape.seq * shape.hidden  # of one block's forward
    left_out = attention / 2 if row.attention_flops == "causal" else 0.0
    again = {"none": 0.0, "full": block_forward_flops(shape) - left_out, "selective": attention}
    counted = model_flops_per_token(shape) - 3 * shape.layers * left_out
    blocks = row.recompute_blocks or shape.layers
    return counted + (blocks * again[row.recompute] if row.measure.hardware else 0.0)


def peak_flops(row: PublishedRow, device: Device) -> float:
    """The FLOP/s of one GPU of which the row's utilisation is a share: those that the row states,
    or the dense peak of ``device``. Raises UnpredictableError if neither is known."""
    known = device.peak_fp32_tflops if row.dtype == "fp32" else device.peak_bf16_tflops
    peak = row.utilization_peak_tflops or known
    if peak is None:
        raise UnpredictableError(
            f"utilization_peak_tflops='': no peak of device={row.device} is known"
        )
    return peak * 1e12
