"""The encoder: texts in, pooled and unnormalised embeddings out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from whiten_index.encoding.batching import TokenWindow, batches_by_length, tokenize
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.pooling import Pooling, mean_layers, pool
from whiten_index.encoding.spec import EncoderConfig, EncoderSpec, resolve_encoder
from whiten_index.errors import ConfigError, EncoderError

_TOKEN_BUDGET = {"cpu": 4096, "other": 65_536}
_MOST_ROWS = {"cpu": 128, "other": 2048}


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encoder made of n texts.

    Attributes:
        embeddings: (n, d) float32, in the order of the texts.
        truncated: how many texts were longer than the token limit.
        tokens: tokens encoded, padding not counted.
    """

    embeddings: NDArray[np.float32]
    truncated: int
    tokens: int


class Encoder:
    """A Transformer with its tokenizer, pooling and device.

    Attributes:
        spec: what makes its embeddings what they are.
        device: where it runs.
    """

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.spec = spec
        self.device = _device(config.device)
        self._pooling = Pooling(spec.pooling)
        self._tokenizer, self._model = _load(spec, folder, self.device)
        self._pad = int(self._tokenizer.pad_token_id or 0)

    @classmethod
    def load(cls, model: str | None = None, **options: Any) -> Encoder:
        """Load a model by hub name, local folder, or None for the embedded one.

        Args:
            model: see ``find_model``.
            options: the other fields of ``EncoderConfig``.

        Raises:
            EncoderError: the model cannot be found or loaded.
            ConfigError: an option does not fit the model or the machine.
        """
        config = EncoderConfig(model=model, **options)
        return cls(*resolve_encoder(config), config)

    @property
    def dim(self) -> int:
        """Width d of the embeddings."""
        return self.spec.dim

    @property
    def fingerprint(self) -> str:
        """Identity of the embeddings: equal fingerprints, equal embeddings."""
        return self.spec.fingerprint

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of documents, (n, d) float32, unnormalised.

        Raises:
            EncoderError: the model gives NaN or infinity.
        """
        return self.encode_window(_listed(texts)).embeddings

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of queries, (n, d): with the model's query prompt, if any."""
        return self._encode([self.spec.query_prompt + text for text in _listed(texts)]).embeddings

    def encode_window(
        self, texts: Sequence[str], *, advance: Callable[[int], None] | None = None
    ) -> Encoded:
        """Encode a window of documents, sorted by length inside, in their order outside.

        Args:
            texts: n texts, as many as may be held tokenised at once.
            advance: told how many texts each batch held, as it is done.
        """
        return self._encode([self.spec.document_prompt + text for text in texts], advance)

    def _encode(
        self, texts: Sequence[str], advance: Callable[[int], None] | None = None
    ) -> Encoded:
        lowered = [text.lower() for text in texts] if self.spec.lower_case else list(texts)
        window = tokenize(self._tokenizer, lowered, max_length=self.spec.max_length)
        embeddings = np.empty((len(texts), self.dim), dtype=np.float32)
        kind = "cpu" if self.device.type == "cpu" else "other"
        for rows in batches_by_length(
            window.lengths, token_budget=_TOKEN_BUDGET[kind], most_rows=_MOST_ROWS[kind]
        ):
            embeddings[rows] = self._forward(window, rows)
            if advance is not None:
                advance(len(rows))
        if not np.isfinite(embeddings).all():
            broken = int(np.argmin(np.isfinite(embeddings).all(axis=1)))
            raise EncoderError(
                f"model {self.spec.model} in {self.spec.dtype} gives NaN or infinity for "
                f"{texts[broken][:60]!r}; use --dtype float32 or bfloat16"
            )
        return Encoded(embeddings, window.truncated, len(window.ids))

    @torch.inference_mode()
    def _forward(self, window: TokenWindow, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        ids, mask = (
            torch.from_numpy(a).to(self.device, non_blocking=True)
            for a in window.padded(rows, self._pad)
        )
        last_only = self.spec.layers == (self._last_layer,)
        output = self._model(input_ids=ids, attention_mask=mask, output_hidden_states=not last_only)
        states = (
            output.last_hidden_state
            if last_only
            else mean_layers(output.hidden_states, self.spec.layers)
        )
        embeddings: NDArray[np.float32] = pool(states, mask, self._pooling).cpu().numpy()
        return embeddings

    @property
    def _last_layer(self) -> int:
        config = self._model.config
        return int(getattr(config, "num_hidden_layers", None) or config.num_layers)


def _listed(texts: Sequence[str]) -> Sequence[str]:
    if isinstance(texts, str):
        raise ConfigError("encode takes a list of texts; put the one text in brackets")
    return texts


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0][:100]}); "
            "use --device auto or cpu"
        ) from error
    return device


def _load(spec: EncoderSpec, folder: ModelFolder, device: torch.device) -> tuple[Any, Any]:
    # Loading prints bars and reports of its own, which belong to no caller of this library.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder.path, trust_remote_code=spec.trust_remote_code
        )
        model, loading = transformers.AutoModel.from_pretrained(
            folder.path,
            dtype=getattr(torch, spec.dtype),
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:
        # transformers raises what its dozens of loaders raise; for a user all mean the same.
        raise EncoderError(
            f"model {spec.model} cannot be loaded ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:160]}); check the folder, or --trust-remote-code if the "
            "model comes with code you trust"
        ) from error
    # Poolers are left out of many checkpoints and never used here.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise EncoderError(
            f"the weights of {spec.model} lack {len(missing)} tensors (such as {missing[0]}): they "
            "would be random numbers; complete the model folder"
        )
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    return tokenizer, encoder.to(device).eval()
