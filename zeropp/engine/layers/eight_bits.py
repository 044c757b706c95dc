"""Linear layers whose products are in 8 bits: torchao's ``Float8Linear`` (its extra is ``fp8``).

A converted layer has the parameters and the names of ``nn.Linear``, so that masters, gradients,
optimizer and checkpoints are as without. Each of the three products of a layer casts its factors to
8 bits, with scales from their own values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

# torchao's default, and the fastest: one scale per tensor (``scaling`` of conf/program).
_RECIPE = "tensorwise"
_ROWS = 16  # the sides of a GPU's 8-bit products are multiples of it


def to_8_bits(layer: nn.Module, device: torch.device, *, gathers_casts: bool = False) -> nn.Module:
    """The layer, in which each ``nn.Linear`` whose sides are multiples of 16 multiplies in 8 bits,
    which CPUs emulate. ``gathers_casts``: FSDP2 gathers their weights in 8 bits."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(_RECIPE),
        emulate=device.type == "cpu",
        pad_inner_dim=True,  # a weight's gradient sums over tokens, of any number
        enable_fsdp_float8_all_gather=gathers_casts,
    )

    def fits(module: nn.Module, _: str) -> bool:
        return type(module) is nn.Linear and not any(n % _ROWS for n in module.weight.shape)

    converted: nn.Module = convert_to_float8_training(layer, config=config, module_filter_fn=fits)
    return converted


@cache
def _cast(*, compiled: bool) -> Any:
    """torchao's cast of a tensor to 8 bits. In eager torch it moves many times the bytes."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    return torch.compile(hp_tensor_to_float8_dynamic) if compiled else hp_tensor_to_float8_dynamic


class EightBitProducts:
    """The three products of a ``Float8Linear``, one by one, as its own forward and backward
    (``torchao/float8/float8_linear.py``) have them."""

    def __init__(self, layer: Any) -> None:
        self._config, self._products = layer.config, layer.linear_mm_config

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, in] and [out, in] to [rows, out]."""
        config = self._config
        return self._cast(x, "INPUT", config.cast_config_input, -1) @ self._cast(
            weight.t(), "WEIGHT", config.cast_config_weight, 0
        )

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """[rows, out] and [out, in] to [rows, in]."""
        config = self._config
        factor = self._cast(weight.t(), "WEIGHT", config.cast_config_weight_for_grad_input, -1)
        return self._cast(grad, "GRAD_OUTPUT", config.cast_config_grad_output, -1) @ factor.t()

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """[rows, out] and [rows, in] to [out, in]."""
        config = self._config
        factor = self._cast(x, "INPUT", config.cast_config_input_for_grad_weight, 0)
        left = self._cast(grad, "GRAD_OUTPUT", config.cast_config_grad_output_for_grad_weight, 0)
        return left.t() @ factor

    def _cast(self, tensor: Tensor, role: str, settings: Any, dim: int) -> Tensor:
        """A factor in 8 bits, or as it is where the recipe leaves it; ``dim``: along which a scale
        per row is taken."""
        from torchao.float8.config import ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim
        from torchao.float8.float8_training_tensor import GemmInputRole

        if settings.scaling_type is ScalingType.DISABLED:
            return tensor
        granularity = settings.scaling_granularity
        cast: Tensor = _cast(compiled=tensor.is_cuda)(
            tensor,
            settings.target_dtype,
            self._products,
            gemm_input_role=GemmInputRole[role],
            scaling_granularity=granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, granularity),
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )
        return cast
