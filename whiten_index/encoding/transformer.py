"""The model itself: token ids in, one pooled and unnormalised embedding a text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from whiten_index.collector import collector_held_back
from whiten_index.encoding.head import load_head
from whiten_index.encoding.layers import ChosenLayers
from whiten_index.encoding.loading import cannot_load, code_pin, load_tokenizer
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.packing import PackedForward, can_pack, pool_packed
from whiten_index.encoding.pooling import Pooling, pool
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.errors import EncoderError

Pool = Callable[[Tensor, Pooling], Tensor]
# Matrix products of so many rows give each row the same bits as those of any more: measured, of
# MKL with AVX-512 on x86, one thread, from 16 rows on. Other libraries and instructions (AVX2, ARM,
# Accelerate) are untried.
_FEWEST_ROWS = 64


class Transformer:
    """A loaded model with its layers, pooling, head and device; threads may share it.

    Attributes:
        device: where it runs.
        tokenizer: of transformers.
        pad: token id that fills up short texts.
        vocabulary: number of tokens that the model knows, None where it does not say.
        packs: whether texts can be given end to end, without padding.
        fewest_rows: tokens, or texts for a head, that a batch is filled up to so that what a text
            gives does not depend on the others; 0 where that is not so in any case.
    """

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, device: torch.device) -> None:
        self.device = device
        self.tokenizer, model = load_transformer(spec, folder, device)
        self._model = model
        self.pad = int(self.tokenizer.pad_token_id or 0)
        config = model.config
        known = model.get_input_embeddings()
        self.vocabulary: int | None = getattr(known, "num_embeddings", None)
        last = int(getattr(config, "num_hidden_layers", None) or config.num_layers)
        packs = can_pack(model, device, model.dtype)
        self._packed = PackedForward(model) if packs else None
        # Padding has a text depend on its batch whatever is done, and so do a GPU's kernels.
        self.fewest_rows = _FEWEST_ROWS if packs and device.type == "cpu" else 0
        self._layers = ChosenLayers(model, spec.layers, last)
        self._pooling = Pooling(spec.pooling)
        head = load_head(folder)
        self._head = None if head is None else head.to(device)
        # A decoder would otherwise keep keys and values for a next token that never comes.
        self._options = {"use_cache": False} if hasattr(config, "use_cache") else {}

    @property
    def packs(self) -> bool:
        """Whether texts can be given end to end, without padding."""
        return self._packed is not None

    @torch.inference_mode()
    def padded(self, ids: Tensor, mask: Tensor | None, *, prompt_tokens: int = 0) -> Tensor:
        """Return (n, d) float32 on the device.

        Args:
            ids: (n, t) token ids, padded on the right.
            mask: (n, t), 1 where there is a token; None where no row is padded.
            prompt_tokens: tokens at the front of every text that are not pooled.
        """
        inputs = {"input_ids": ids, "attention_mask": mask, **self._options}
        mask = torch.ones_like(ids) if mask is None else mask
        return self._embedded(
            inputs,
            lambda states, pooling: pool(states, mask, pooling, prompt_tokens=prompt_tokens),
        )

    @torch.inference_mode()
    def packed(
        self, ids: Tensor, lengths: Tensor, offsets: Tensor, longest: int, *, prompt_tokens: int = 0
    ) -> Tensor:
        """Return (n, d) float32 on the device, no token of padding computed.

        Args:
            ids: (total,) token ids, text after text.
            lengths: (n,) tokens of each text.
            offsets: (n + 1,) int32, where each begins.
            longest: the greatest of the lengths.
            prompt_tokens: tokens at the front of every text that are not pooled.
        """
        assert self._packed is not None
        inputs = self._packed.inputs(ids, lengths, offsets, longest)
        return self._embedded(
            inputs,
            lambda states, pooling: pool_packed(
                states[0], offsets, pooling, prompt_tokens=prompt_tokens
            ),
        )

    def _embedded(self, inputs: dict[str, Any], pool: Pool) -> Tensor:
        """Return (n, d) for a model's inputs; ``pool`` takes its states (n, t, d) or (1, T, d)."""
        pooled = pool(self._layers(**inputs), self._pooling)
        if self._head is None:
            return pooled
        # Texts without padding are the same in any company, and so after the head.
        rows = pad(pooled, (0, 0, 0, max(self.fewest_rows - len(pooled), 0)))
        embeddings: Tensor = self._head(rows)[: len(pooled)]
        return embeddings


class LayeredTransformer(Transformer):
    """Gives the pooled states of every chosen layer side by side, before any head.

    A text has (P·S·d) numbers: by pooling, by layer, by coordinate.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        folder: ModelFolder,
        device: torch.device,
        poolings: Sequence[Pooling],
    ) -> None:
        super().__init__(replace(spec, pooling=poolings[0].value), folder, device)
        self._poolings = tuple(poolings)

    def _embedded(self, inputs: dict[str, Any], pool: Pool) -> Tensor:
        states = self._layers.each(**inputs)
        return torch.cat([pool(state, each) for each in self._poolings for state in states], dim=1)


def load_transformer(
    spec: EncoderSpec, folder: ModelFolder, device: torch.device
) -> tuple[Any, Any]:
    """Return a model's tokenizer, and the model without a head, for evaluation.

    Raises:
        EncoderError: they cannot be loaded, or weights are missing.
    """
    tokenizer = load_tokenizer(spec, folder)
    transformers.utils.logging.disable_progress_bar()
    try:
        # Most of transformers is imported here.
        with collector_held_back():
            model, loading = transformers.AutoModel.from_pretrained(
                folder.path,
                dtype=getattr(torch, spec.dtype),
                trust_remote_code=folder.trust_remote_code,
                local_files_only=folder.local_files_only,
                **code_pin(folder),
                # A pickle may hold code, which never runs.
                weights_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise cannot_load(f"model {spec.model}", error) from error
    # Poolers are left out of many checkpoints and never used here.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise EncoderError(
            f"the weights of {spec.model} lack {len(missing)} tensors (such as {missing[0]}): they "
            "would be random numbers; complete the model folder"
        )
    encoder = (model.get_encoder() if model.config.is_encoder_decoder else model).to(device).eval()
    return tokenizer, encoder
