"""Checks of a model's ``config.json``, before transformers makes what it says."""

from collections.abc import Iterator, Mapping
from typing import Any

from whiten_index.errors import EncoderError
from whiten_index.paths import shown

WIDTHS = ("hidden_size", "d_model", "dim", "n_embd")
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# Each takes memory and time before it is compared with the weights, or shows in none of them.
_LIMITS = {
    "layers": (
        (*LAYERS, "num_dense_layers", "first_k_dense_replace", "num_mtp_layers",
         "num_nextn_predict_layers", "num_residual_layers", "block_repeats"), 1000,
    ),
    "labels": (("num_labels",), 100_000),
    "positions": (
        ("max_position_embeddings", "n_positions", "max_positions", "context_length",
         "prediction_length"), 1 << 20,
    ),
    "tokens": (("max_seq_len",), 1 << 18),
    "tokens of a window": (
        ("attention_window", "block_size", "local_attn_chunk_length", "lsh_attn_chunk_length"),
        2048,
    ),
    "tokens of a radius": (("local_radius",), 512),
    "experts": (("num_experts", "num_local_experts"), 10_000),
}  # fmt: skip
# transformers computes a table of sines for these, number by number: of positions times the width,
# which may be left out of the configuration.
_TABLED = (
    "ctrl", "distilbert", "flaubert", "marian", "pegasus", "roformer", "xlm", "autoformer",
    "informer", "time_series_transformer",
)  # fmt: skip
# Families that pad a short text to a window, or make a table for it.
_WINDOWED = (
    "big_bird", "bigbird_pegasus", "led", "longformer", "longt5", "minimax", "mpt", "pegasus_x",
    "reformer",
)  # fmt: skip
# Ways to compute that transformers has; others, and for some families native code, it fetches.
_KERNELS = (None, "eager", "sdpa", "grouped_mm", "batched_mm")
_ON_GPUS = ("mra", "rwkv", "yoso")
_TABLE_NUMBERS, _TABLE_WIDTH = 1 << 23, 1024


def refuse_code(name: str, config: Mapping[str, Any], *, consent: bool) -> None:
    """Refuse a configuration by which transformers would fetch code or another model."""
    for elsewhere in ("configuration_files", "attribute_map"):
        if any(named_in(config, elsewhere)):
            raise EncoderError(
                f"config.json of model {name} sets {elsewhere}, by which transformers would read "
                "other settings than those that are checked; take it out"
            )
    for own in ("attn_implementation", "experts_implementation"):
        kernels = (each for each in named_in(config, own, f"_{own}") if each not in _KERNELS)
        if (kernel := next(kernels, None)) is not None:
            raise EncoderError(
                f"config.json of model {name} names code ({own} {shown(kernel)}) that may come "
                "from the hub, and would run; take the setting out"
            )
    families = list(named_in(config, "model_type"))
    native = [f"is of the family {each}" for each in families if each in _ON_GPUS]
    if why := not consent and ["has quantized weights"] * is_quantized(config) + native:
        raise EncoderError(
            f"model {name} {why[0]}, for which code may come from the hub; if you trust it, pass "
            "--trust-remote-code (in Python trust_remote_code=True)"
        )
    images = (
        each
        for key in ("backbone", "architecture")
        for each in named_in(config, key)
        if each and (key == "backbone" or ":" in str(each))
    )
    if (image := next(images, None)) is not None:
        raise EncoderError(
            f"config.json of model {name} names a model of images on the hub ({shown(image)}), "
            "which would be fetched; name a model of texts"
        )


def refuse_sizes(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that takes memory or time without end, or texts of one length."""
    if any(named_in(config, "use_tpu_fourier_optimizations")):
        raise EncoderError(
            f"config.json of model {name} sets use_tpu_fourier_optimizations, by which it takes "
            "texts of one length alone; set it to false, which gives the same embeddings"
        )
    families = list(named_in(config, "model_type"))
    tabled, windowed = (any(each in of for each in families) for of in (_TABLED, _WINDOWED))
    widths = (each for each in named_in(config, *WIDTHS, "emb_dim") if isinstance(each, int))
    rows = _TABLE_NUMBERS // max([_TABLE_WIDTH, *widths])
    for what, (keys, most) in _LIMITS.items():
        if what.startswith("tokens") and not windowed:
            continue
        most = rows if tabled and what == "positions" else most
        named = (v if isinstance(v, list) else [v] for v in named_in(config, *keys))
        said = [each for values in named for each in values if isinstance(each, int)]
        if what == "layers":
            said += map(_attention_layers, named_in(config, "attention_types"))
        if (number := max(said, default=0)) > most:
            raise EncoderError(
                f"config.json of model {name} says {number:,} {what}; a model has at most "
                f"{most:,}; restore the model folder"
            )


def _attention_layers(types: Any) -> int:
    """Return the layers of GPT-Neo's pairs of kinds and a number, which transformers writes out."""
    found = 0
    for each in types if isinstance(types, list) else ():
        match each:
            case [list() | dict() | str() as kinds, int(number), *_]:
                found += max(len(kinds), 1) * max(number, 0)
    return found


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration says how weights are quantized."""
    return any(named_in(config, "quantization_config"))


def named_in(value: Any, *keys: str) -> Iterator[Any]:
    """Yield what a JSON value, or an object inside it, has under some keys."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict):
        yield from (value[key] for key in keys if key in value)
    for each in inside:
        yield from named_in(each, *keys)
