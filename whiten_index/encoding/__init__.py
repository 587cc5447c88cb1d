"""Texts to embeddings. torch and transformers load with ``Encoder``, not before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from whiten_index.encoding.devices import chosen_devices, window_factor
from whiten_index.encoding.models import ModelFolder, embedded_available, find_model
from whiten_index.encoding.passages import PassageConfig, PassageSplitter
from whiten_index.encoding.spec import (
    DEFAULT_MODEL,
    DTYPES,
    POOLINGS,
    EncoderConfig,
    EncoderSpec,
    recorded_config,
    recorded_spec,
    resolve_encoder,
    states_spec,
)

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import Encoded, Encoder, RanWindow
    from whiten_index.encoding.layer_encoder import StateEncoder
    from whiten_index.encoding.windows import PreparedWindow

__all__ = [
    "DEFAULT_MODEL",
    "DTYPES",
    "POOLINGS",
    "Encoded",
    "Encoder",
    "EncoderConfig",
    "EncoderSpec",
    "ModelFolder",
    "PassageConfig",
    "PassageSplitter",
    "PreparedWindow",
    "RanWindow",
    "StateEncoder",
    "chosen_devices",
    "embedded_available",
    "find_model",
    "recorded_config",
    "recorded_spec",
    "resolve_encoder",
    "states_spec",
    "window_factor",
]


_HOME = {
    "Encoded": "encoder",
    "Encoder": "encoder",
    "PreparedWindow": "windows",
    "RanWindow": "encoder",
    "StateEncoder": "layer_encoder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found
