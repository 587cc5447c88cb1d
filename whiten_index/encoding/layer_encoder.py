"""Every hidden state of a text, pooled: one forward pass for any combination of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whiten_index.encoding.encoder import Encoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.pooling import Pooling
from whiten_index.encoding.spec import (
    EncoderSpec,
    resolve_encoder,
    states_spec,
)
from whiten_index.encoding.transformer import LayeredTransformer, Transformer

_WINDOW_BYTES = 256 << 20


class StateEncoder(Encoder):
    """Gives the pooled states of all layers, 0 (embeddings) to L, side by side.

    A text has P·S·d numbers in float32: by pooling, by layer (S = L + 1), by coordinate. Heads and
    normalisations that a model's folder adds after pooling are left out: they have no meaning for
    lower layers.

    Attributes:
        poolings: the P ways of pooling.
        layers: S, how many states there are.
        width: d of one state.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        folder: ModelFolder,
        config: EncoderConfig,
        *,
        poolings: Sequence[str] = ("mean",),
    ) -> None:
        self.poolings = tuple(poolings)
        self.layers, self.width = folder.layers + 1, folder.hidden_size
        super().__init__(states_spec(spec, folder, self.poolings), folder, config)

    @classmethod
    def load(
        cls, model: str | None = None, *, poolings: Sequence[str] = ("mean",), **options: Any
    ) -> StateEncoder:
        """Load a model; see ``Encoder.load``, whose ``pooling`` and ``layers`` play no part."""
        config = EncoderConfig(model=model, **options)
        return cls(*resolve_encoder(config), config, poolings=poolings)

    @property
    def window_rows(self) -> int:
        """How many texts are sorted by length together: fewer where a text has many numbers."""
        return max(min(super().window_rows, _WINDOW_BYTES // (4 * self.dim)), 1)

    def _open(self, spec: EncoderSpec, folder: ModelFolder) -> Transformer:
        return LayeredTransformer(
            spec, folder, self.device, [Pooling(each) for each in self.poolings]
        )
