"""Layers of a model on a CPU, by the fastest products that torch has for them.

torch multiplies float32 by MKL. On AMD's processors with AVX-512, MKL reaches half of what oneDNN
does, which torch has too. oneDNN also multiplies in bfloat16, where the processor can: then
products are in bfloat16, sums of residuals and norms in float32, and attention of BERT and its kin
in bfloat16 too.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from whiten_index.encoding.pooling import relative_error

# Relative errors of the states of a few tokens: of rounding in another order, or to fewer bits.
TRIAL_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
TORCH = "torch"
_ROWS = 1024  # that the layout of weights is made for
_LAYERS = frozenset({"BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer"})


def use_fastest_products(model: Any, dtype: str, *, last: bool) -> str:
    """Replace a float32 model's layers by faster ones, and return the library of the products.

    Inputs and outputs stay float32. The model stays as it was if its states change by more than
    rounding.

    Args:
        model: Transformer in evaluation mode.
        dtype: that products may be rounded to: bfloat16; anything else is float32.
        last: whether the states of the last layer are all that is wanted.
    """
    # By the kind of processor: what is timed would change with other work on the machine, and with
    # it the last bits of embeddings.
    can = {"bfloat16": has_bfloat16(), "float32": _is_amd_with_avx512()}
    for name in dict.fromkeys((dtype, "float32")):
        try:
            if can.get(name) and _replace(model, getattr(torch, name), layers=last):
                return f"oneDNN {name}"
        except (RuntimeError, AttributeError):
            # This torch has not the operators.
            continue
    return TORCH


def has_bfloat16() -> bool:
    """Return whether this processor multiplies in bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _is_amd_with_avx512() -> bool:
    facts = ""
    with contextlib.suppress(OSError):
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "AuthenticAMD" in facts and torch.backends.cpu.get_cpu_capability() == "AVX512"


class _Product(nn.Module):
    """Linear layers of the same rows as one, (…, n) to (…, m), by oneDNN.

    Args:
        layers: layers of float32, whose results are joined.
        dtype: that oneDNN computes in, with weights laid out for it.
        gelu: whether GELU comes after them.
        narrow: whether the result stays in ``dtype``, for attention or another product; float32
            otherwise.
    """

    def __init__(
        self, *layers: nn.Linear, dtype: torch.dtype, gelu: bool = False, narrow: bool = False
    ) -> None:
        super().__init__()
        self.dtype, self.gelu = dtype, gelu
        self.out_dtype = dtype if narrow else torch.float32
        weight = layers[0].weight.detach()
        if len(layers) > 1:
            weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases).to(dtype) if biases else None
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        after = "gelu" if self.gelu else "none"
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype), self.weight, self.bias, after, [], "none"
        )
        return product.to(self.out_dtype)


class _Layer(nn.Module):
    """A layer of BERT or its kin, with one product for query, key and value: (b, t, d) to the same.

    It calls fewer modules than transformers' own layer, and threads wait for each other's Python.
    """

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        own, out = layer.attention.self, layer.attention.output
        self.heads, self.scaling = own.num_attention_heads, own.scaling
        self.joint = _Product(own.query, own.key, own.value, dtype=dtype, narrow=True)
        self.out, self.norm = _Product(out.dense, dtype=dtype), out.LayerNorm
        self.wide = _Product(layer.intermediate.dense, dtype=dtype, gelu=True, narrow=True)
        self.last = _Product(layer.output.dense, dtype=dtype)
        self.last_norm = layer.output.LayerNorm

    def forward(
        self, states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        joint = self.joint(states).unflatten(-1, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=self.scaling
        )
        attended = attended.transpose(1, 2).flatten(-2)
        states = self.norm(self.out(attended).add_(states))
        done: Tensor = self.last_norm(self.last(self.wide(states)).add_(states))
        return done


@torch.inference_mode()
def _replace(model: Any, dtype: torch.dtype, *, layers: bool) -> bool:
    """Replace layers unless that changes the states of a few tokens too much."""
    ids = torch.arange(8)[None] % model.config.vocab_size
    expected = model(input_ids=ids).last_hidden_state
    # transformers finds the states of layers by their class.
    layers = layers and model.config._attn_implementation == "sdpa"
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def put(parent: nn.Module, name: str, module: nn.Module) -> None:
        replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, module)

    def visit(parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            layer: Any = child
            kin = layers and type(child).__name__ in _LAYERS and not layer.is_decoder
            if kin and _has_gelu(layer.intermediate):
                put(parent, name, _Layer(child, dtype))
            elif type(child) is nn.Linear:
                put(parent, name, _Product(child, dtype=dtype))
            else:
                visit(child)

    agrees = False
    try:
        visit(model)
        found = model(input_ids=ids).last_hidden_state
        agrees = relative_error(found, expected) <= TRIAL_ERRORS[dtype]
    finally:
        if not agrees:
            for parent, name, module in reversed(replaced):
                setattr(parent, name, module)
    return agrees


def _has_gelu(module: Any) -> bool:
    activation = getattr(module, "intermediate_act_fn", None)
    # It takes seconds to load, which a static model need not.
    from transformers.activations import GELUActivation

    return isinstance(activation, GELUActivation) and activation.act is gelu
