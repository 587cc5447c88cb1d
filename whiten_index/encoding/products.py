"""Linear layers of a model on a CPU, by the fastest products that torch has for them.

torch multiplies float32 by MKL. On AMD's processors with AVX-512, MKL reaches half of what oneDNN
does, which torch has too. oneDNN also multiplies in bfloat16, where the processor can: then
products and attention are in bfloat16, sums of residuals and norms in float32.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

# Relative errors of the states of a few tokens: of rounding in another order, and of bfloat16.
_TRIAL_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
TORCH = "torch"
_ATTENDED = ("query", "key", "value")  # layers of BERT and its kin that only attention reads
_ROWS = 1024  # that the layout of weights is made for


def use_fastest_products(model: Any, *, bfloat16: bool) -> str:
    """Replace a float32 model's linear layers where that is faster here, and return the products.

    Inputs, outputs and all else stay float32. The model stays as it was if its states change by
    more than rounding.

    Args:
        model: Transformer in evaluation mode.
        bfloat16: whether products in bfloat16 may be used, summed in float32.
    """
    # By the kind of processor: what is timed would change with other work on the machine, and with
    # it the last bits of embeddings.
    kinds = [torch.bfloat16] if bfloat16 and _has_bfloat16() else []
    for dtype in [*kinds, *([torch.float32] if _is_amd_with_avx512() else [])]:
        try:
            if _replace(model, dtype):
                return f"oneDNN {str(dtype).removeprefix('torch.')}"
        except (RuntimeError, AttributeError):
            # This torch has not the operators.
            continue
    return TORCH


def _has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _is_amd_with_avx512() -> bool:
    facts = ""
    with contextlib.suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "AuthenticAMD" in facts and torch.backends.cpu.get_cpu_capability() == "AVX512"


class _PackedLinear(nn.Module):
    """A linear layer by oneDNN, with weights laid out for it: (…, n) to (…, m).

    Args:
        layer: layer of float32 to compute.
        dtype: that its products are computed in.
        gelu: whether GELU comes after it.
        narrow: whether the result stays in ``dtype``, for attention or another product; float32
            otherwise.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, *, gelu: bool, narrow: bool) -> None:
        super().__init__()
        self.dtype, self.activation = dtype, "gelu" if gelu else "none"
        self.made = dtype if narrow else torch.float32
        weight = layer.weight.detach().to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype), self.weight, self.bias, self.activation, [], "none"
        )
        return product.to(self.made)


@torch.inference_mode()
def _replace(model: Any, dtype: torch.dtype) -> bool:
    """Replace the linear layers unless that changes the states of a few tokens too much."""
    ids = torch.arange(8)[None] % model.config.vocab_size
    expected = model(input_ids=ids).last_hidden_state
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def put(parent: nn.Module, name: str, module: nn.Module) -> None:
        replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, module)

    for parent in list(model.modules()):
        activation = getattr(parent, "intermediate_act_fn", None)
        fused = isinstance(activation, GELUActivation) and activation.act is nn.functional.gelu
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                gelu = fused and name == "dense"
                narrow = gelu or name in _ATTENDED
                put(parent, name, _PackedLinear(child, dtype, gelu=gelu, narrow=narrow))
        if fused:
            put(parent, "intermediate_act_fn", nn.Identity())
    agrees = False
    try:
        found = model(input_ids=ids).last_hidden_state
        agrees = float((found - expected).norm() / expected.norm()) <= _TRIAL_ERRORS[dtype]
    finally:
        if not agrees:
            for parent, name, module in reversed(replaced):
                setattr(parent, name, module)
    return agrees
