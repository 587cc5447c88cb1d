"""Embeddings by the ONNX file of a model's folder, on a CPU. Importing it loads no torch.

Such a file may be of other weights than the folder's, or in another type; the canary of store and
index shows that. Layers below the last, heads and decoders need torch.
"""

import mmap
import os
import re
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists, is_file, open_regular, unforeseen
from whiten_index.encoding.batching import BatchEncoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.model_files import inside, loading_model
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.tokenization import load_tokenizer
from whiten_index.encoding.window_encoder import TextWindow
from whiten_index.errors import ConfigError, EncoderError, first_line, require_installed

_FILES = ("onnx/model.onnx", "model.onnx")
# The name of a file of tensors, with its length before it: seven bits a byte, the lowest first.
_LOCATION = rb"\n\x08location"
_NAMED = re.compile(_LOCATION + rb"\x12([\x01-\x7f]|[\x80-\xff][\x01-\x7f])", re.DOTALL)
_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


class OnnxEncoder(BatchEncoder):
    """A Transformer run by ONNX Runtime, with the identity of the same model run by torch."""

    batch_tokens = 4096

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
        _require_fitting(spec, folder, config)
        super().__init__(spec, load_tokenizer(spec, folder))
        self._session = _session(folder, config.threads)
        self._inputs = {each.name for each in self._session.get_inputs()}
        if unknown := self._inputs - _INPUTS:
            raise EncoderError(
                f"the ONNX file of {spec.model} wants {', '.join(sorted(unknown))}, which an "
                "encoder of texts has not; use --backend torch"
            )

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of the libraries."""
        names = ("onnxruntime", "transformers", "tokenizers")
        return {**{name: version(name) for name in names}, "inputs": "padded: ONNX"}

    def embed(self, window: TextWindow, rows: slice) -> NDArray[np.float32]:
        """Return the embeddings of some of the different texts, as one batch."""
        spec, tokens = self.spec, window.tokens
        assert tokens is not None
        lengths = tokens.lengths[rows, None]
        mask = np.arange(lengths.max()) < lengths
        ids = np.full(mask.shape, int(self._tokenizer.pad_token_id or 0), np.int64)
        ids[mask] = tokens.ids[tokens.offsets[rows.start] : tokens.offsets[rows.stop]]
        given = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
        given["token_type_ids"] = np.zeros_like(ids)
        try:
            states, *_ = self._session.run(None, {name: given[name] for name in self._inputs})
            states = np.asarray(states, np.float32)
        except Exception as error:
            if unforeseen(error, step="encode") is not None:
                raise
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
        return _pool(states, mask, spec.pooling)


def _require_fitting(spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
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

    paths = (inside(folder.root, name) for name in _FILES)
    if (path := next(filter(exists, paths), None)) is None:
        raise EncoderError(
            f"{folder.root} has no {_FILES[0]}; export the model by optimum, or use torch (pip "
            "install 'whiten-index[encode]')"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 4  # what it logs quotes the file, control characters included
    with loading_model(str(path), folder.root):
        # Else they are mapped, and what is written to them later would show.
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            named = set[bytes]()
            for found in _NAMED.finditer(data):
                length = sum((each & 127) << 7 * place for place, each in enumerate(found[1]))
                named.add(data[found.end() : found.end() + length])
            if len(re.findall(_LOCATION, data)) != len(re.findall(_NAMED, data)):
                raise ValueError("it names files of tensors in a way that is not known")
        files = {name: inside(path.parent, name) for name in map(os.fsdecode, sorted(named))}
        files = {name: file for name, file in files.items() if is_file(file)}
        tensors = list[bytes]()
        for each in files.values():
            with open_regular(each) as file:
                tensors.append(file.read())
        options.add_external_initializers_from_files_in_memory(
            list(files), tensors, list(map(len, tensors))
        )
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _pool(
    states: NDArray[np.float32], mask: NDArray[np.bool_], pooling: str
) -> NDArray[np.float32]:
    """Return (n, d) of states (n, t, d) padded on the right; see ``pooling.pool``."""
    if pooling in ("cls", "last"):
        places = 0 if pooling == "cls" else mask.sum(axis=1) - 1
        return np.asarray(states[np.arange(len(states)), places])
    if pooling == "max":
        lowest = np.finfo(np.float32).min
        return np.asarray(np.where(mask[:, :, None], states, lowest).max(axis=1))
    weight = mask * (mask.cumsum(axis=1) if pooling == "weightedmean" else np.float32(1))
    total = weight.sum(axis=1, keepdims=True, dtype=np.float32)
    mean: NDArray[np.float32] = (weight[:, None].astype(np.float32) @ states)[:, 0] / total
    return mean * np.sqrt(total) if pooling == "mean_sqrt_len_tokens" else mean
