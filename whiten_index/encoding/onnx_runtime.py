"""Embeddings by the ONNX file of a model's folder, on a CPU. Importing it loads no torch.

Such a file may be of other weights than the folder's, or in another type; the canary of store and
index shows that. Layers below the last, heads and decoders need torch.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists, require_regular
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.text_encoder import BatchEncoder, EmbeddedTexts
from whiten_index.encoding.tokenization import (
    TokenWindow,
    load_tokenizer,
    tokenize,
    unpooled_tokens,
)
from whiten_index.errors import ConfigError, EncoderError, first_line, require_installed

_FILES = ("onnx/model.onnx", "model.onnx")
_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


class OnnxEncoder(BatchEncoder):
    """A Transformer run by ONNX Runtime.

    Attributes:
        spec: identity of the encoder, which is that of the same model run by torch.
    """

    spec: EncoderSpec

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
        _require_fitting(spec, folder, config)
        self.spec, self._tokenizer = spec, load_tokenizer(spec, folder)
        self._session = _session(folder, config.threads)
        self._inputs = {each.name for each in self._session.get_inputs()}
        if unknown := self._inputs - _INPUTS:
            raise EncoderError(
                f"the ONNX file of {spec.model} wants {', '.join(sorted(unknown))}, which an "
                "encoder of texts has not; use --backend torch"
            )
        prompts = {spec.document_prompt, spec.query_prompt}
        self._unpooled = {
            prompt: unpooled_tokens(self._tokenizer, spec, prompt) for prompt in prompts
        }

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of the libraries."""
        names = ("onnxruntime", "transformers", "tokenizers")
        return {**{name: version(name) for name in names}, "inputs": "padded: ONNX"}

    @property
    def note(self) -> str | None:
        """None: there is nothing to say."""
        return None

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens queries have together, without those that are cut."""
        return len(self._tokens(texts, self.spec.query_prompt).ids)

    def _tokens(self, texts: Sequence[str], prompt: str) -> TokenWindow:
        prompted = [prompt + text for text in texts]
        lowered = [text.lower() for text in prompted] if self.spec.lower_case else prompted
        return tokenize(self._tokenizer, lowered, max_length=self.spec.max_length)

    def _embed(self, texts: Sequence[str], *, queries: bool) -> EmbeddedTexts:
        spec = self.spec
        prompt = spec.query_prompt if queries else spec.document_prompt
        tokens = self._tokens(texts, prompt)
        lengths = tokens.lengths[:, None]
        mask = np.arange(lengths.max()) < lengths
        ids = np.full(mask.shape, int(self._tokenizer.pad_token_id or 0), np.int64)
        ids[mask] = tokens.ids
        given = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
        given["token_type_ids"] = np.zeros_like(ids)
        try:
            states, *_ = self._session.run(None, {name: given[name] for name in self._inputs})
            states = np.asarray(states, np.float32)
        except Exception as error:
            # ONNX Runtime raises many types of errors.
            raise EncoderError(
                f"the ONNX file of {spec.model} cannot be run ({first_line(error)}); use --backend "
                "torch"
            ) from error
        if states.shape != (*mask.shape, spec.dim):
            raise EncoderError(
                f"the ONNX file of {spec.model} gives {states.shape} where the states "
                f"{(*mask.shape, spec.dim)} are wanted; use --backend torch"
            )
        pooled = _pool(states, mask, spec.pooling, self._unpooled[prompt])
        return EmbeddedTexts(pooled[tokens.places], len(tokens.ids), mask.size, tokens.truncated)


def _require_fitting(spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
    """Refuse what the file of a model cannot do."""
    wanted = "torch" if config.backend == "torch" else "--backend torch"
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"ONNX files run on the CPU here, not on {config.device}; use {wanted}")
    for reason, unfit in {
        "is a static model": folder.static,
        "has layers after the pooling": bool(folder.head),
        f"is to give layers {spec.layers}": spec.layers != (folder.layers,),
        f"is to compute in {spec.dtype}": spec.dtype != "float32",
    }.items():
        if unfit:
            raise ConfigError(
                f"{spec.model} {reason}, and an ONNX file has the last layer of a Transformer in "
                f"float32; use {wanted} (pip install 'whiten-index[encode]')"
            )


def _session(folder: ModelFolder, threads: int | None) -> Any:
    require_installed("onnxruntime", by="an ONNX file", extra="onnx")
    import onnxruntime

    path = next((folder.root / name for name in _FILES if exists(folder.root / name)), None)
    if path is None:
        raise EncoderError(
            f"{folder.root} has no {_FILES[0]}; export the model by optimum, or use torch (pip "
            "install 'whiten-index[encode]')"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 4  # what it logs quotes the file, control characters included
    require_regular(path)
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EncoderError(
            f"{path} cannot be loaded ({first_line(error)}); restore the model folder, or use torch"
        ) from error


def _pool(
    states: NDArray[np.float32], mask: NDArray[np.bool_], pooling: str, prompt_tokens: int
) -> NDArray[np.float32]:
    """Return (n, d) of states (n, t, d) padded on the right; see ``pooling.pool``."""
    places = mask.cumsum(axis=1)
    kept = mask & (places > prompt_tokens)
    rows, numbers = np.arange(len(states)), np.arange(mask.shape[1])
    if pooling == "cls":
        return np.asarray(states[rows, kept.argmax(axis=1)])
    if pooling == "last":
        return np.asarray(states[rows, (kept * numbers).argmax(axis=1)])
    if pooling == "max":
        lowest = np.finfo(np.float32).min
        return np.asarray(np.where(kept[:, :, None], states, lowest).max(axis=1))
    weight = (kept * places if pooling == "weightedmean" else kept).astype(np.float32)
    total = np.maximum(weight.sum(axis=1, keepdims=True), 1)
    mean: NDArray[np.float32] = (weight[:, None] @ states)[:, 0] / total
    return mean * np.sqrt(total) if pooling == "mean_sqrt_len_tokens" else mean
