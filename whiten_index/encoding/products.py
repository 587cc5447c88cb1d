"""Linear layers of a model on a CPU, by the fastest products that torch has for them.

torch multiplies float32 by MKL. On AMD's processors with AVX-512, MKL reaches half of what oneDNN
does, which torch has too. oneDNN also multiplies in bfloat16, where the processor can.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import GELUActivation

# Below these, a choice could change from run to run, and with it the last bits of embeddings.
_WORTHWHILE = 1.2
_LEAST_WEIGHTS = 1 << 16
_TRIAL_ROWS, _TRIAL_ROUNDS = 256, 4
# Relative errors of the states of a few tokens: of rounding in another order, and of bfloat16.
_TRIAL_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
TORCH = "torch"


def use_fastest_products(model: Any, *, bfloat16: bool) -> str:
    """Replace a float32 model's linear layers where that is faster here, and return the products.

    Inputs, outputs and all else stay float32. A layer is timed both ways, then the model's
    states are compared; they are left as they were unless both go well.

    Args:
        model: Transformer in evaluation mode.
        bfloat16: whether products in bfloat16 may be used, summed in float32.
    """
    for dtype in (torch.bfloat16, torch.float32) if bfloat16 else (torch.float32,):
        try:
            if _speedup(model, dtype) >= _WORTHWHILE and _replace(model, dtype):
                return f"oneDNN {str(dtype).removeprefix('torch.')}"
        except (RuntimeError, AttributeError):
            # This processor has no such products, or this torch has not the operators.
            continue
    return TORCH


class _PackedLinear(nn.Module):
    """A linear layer by oneDNN, with weights laid out for it: (…, n) to (…, m) float32.

    Args:
        layer: layer of float32 to compute.
        dtype: that its products are computed in.
        gelu: whether GELU comes after it.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, *, gelu: bool = False) -> None:
        super().__init__()
        self.dtype, self.activation = dtype, "gelu" if gelu else "none"
        weight = layer.weight.detach().to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TRIAL_ROWS)
        self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype), self.weight, self.bias, self.activation, [], "none"
        )
        return product.float()


@torch.inference_mode()
def _speedup(model: Any, dtype: torch.dtype) -> float:
    """Return how many times as fast the largest layer is with its products in ``dtype``."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    layer = max(layers, key=lambda found: found.weight.numel(), default=None)
    if layer is None or layer.weight.numel() < _LEAST_WEIGHTS:
        return 0.0
    packed = _PackedLinear(layer, dtype)
    rows = torch.ones(_TRIAL_ROWS, layer.in_features)
    seconds = []
    # By turns, so that other programs slow both.
    for _ in range(_TRIAL_ROUNDS):
        before = time.perf_counter()
        linear(rows, layer.weight, layer.bias)
        between = time.perf_counter()
        packed(rows)
        seconds.append((between - before, time.perf_counter() - between))
    plain, fast = (min(times) for times in zip(*seconds, strict=True))
    return float(plain / fast)


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
                put(parent, name, _PackedLinear(child, dtype, gelu=fused and name == "dense"))
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
