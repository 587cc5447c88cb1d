"""Static models: a table with a row for each token, whose mean is a text's embedding.

model2vec distils them from Transformers; sentence-transformers calls them StaticEmbedding.
"""

import json
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.functional import embedding_bag, pad
from transformers import PreTrainedTokenizerFast

from whiten_index.encoding.encoder import Encoder
from whiten_index.encoding.encoder_config import BackendName
from whiten_index.encoding.model_files import loading_model
from whiten_index.encoding.models import MODEL2VEC, ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.window_encoder import TextWindow
from whiten_index.errors import ConfigError, EncoderError

# Rows of the table that a batch adds up at once.
_BATCH_TOKENS = 65_536
_MOST_NUMBERS = 1 << 31  # of a table
_NO_TOKEN = "<no token>"  # of a text that has none


class StaticEncoder(Encoder):
    """A static model; its embeddings do not depend on batches."""

    batch_tokens, packs, shortest, note = _BATCH_TOKENS, True, 0.0, None
    _inputs, _products = "end to end", "rows of a table"

    def _load_model(self, spec: EncoderSpec, folder: ModelFolder, backend: BackendName) -> Any:
        if spec.pooling != "mean" or spec.dtype != "float32" or backend != "torch":
            raise ConfigError(
                f"{spec.model} is a static model, which adds rows of a table: leave out --pooling, "
                "--dtype and --backend"
            )
        with loading_model(f"model {spec.model}", folder.path):
            backend_tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
            size = backend_tokenizer.get_vocab_size()
            if max(backend_tokenizer.get_vocab().values(), default=0) >= size:
                # PreTrainedTokenizerFast would have a place for each number below it.
                raise ValueError(f"a token has a number that is not below {size}")
            table = _table(load_file(folder.path / "model.safetensors"), size)
            unknown = _unknown(backend_tokenizer)
            backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend_tokenizer)
            tokenizer.add_special_tokens({"pad_token": _NO_TOKEN})
        if table.shape != (size, folder.hidden_size) or tokenizer.pad_token_id != size:
            raise EncoderError(
                f"the table of {spec.model} is {tuple(table.shape)} and its tokenizer has {size} "
                "tokens; restore the model folder"
            )
        # model2vec leaves unknown tokens out; the other tables have a row for them.
        self._left_out = unknown if folder.config.get("model_type") == MODEL2VEC else None
        self._table = pad(table, (0, 0, 0, 1)).to(self.device)
        self._pad, self.vocabulary = size, size + 1
        return tokenizer

    @torch.inference_mode()
    def embed(self, window: TextWindow, rows: slice) -> Tensor:
        """Return the embeddings of some of the different texts, as one batch."""
        ids, offsets = (each.long() for each in self.tokens_of(window, rows))
        kept = ids != self._pad
        if self._left_out is not None:
            kept &= ids != self._left_out
        weights = kept.float()
        sums = embedding_bag(
            ids, self._table, offsets, mode="sum", per_sample_weights=weights,
            include_last_offset=True,
        )  # fmt: skip
        counts = torch.segment_reduce(weights, "sum", offsets=offsets, unsafe=True, initial=0)
        means: Tensor = sums / counts.clamp(min=1).unsqueeze(1)
        return means if self._head is None else self._head(means)


def _table(tensors: dict[str, Tensor], size: int) -> Tensor:
    """Return a row for each of ``size`` tokens, (v, d) float32."""
    if "embedding.weight" in tensors:
        return tensors["embedding.weight"].float()
    table = tensors["embeddings"].float()
    for name in ("mapping", "weights"):
        if name in tensors and tensors[name].shape != (size,):
            raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}")
    if "mapping" in tensors:
        rows = tensors["mapping"].long()
        if size * table.shape[1] > _MOST_NUMBERS or not 0 <= rows.min() <= rows.max() < len(table):
            raise ValueError("mapping names rows that are not there, or too many")
        table = table[rows]
    return table * tensors["weights"].float().unsqueeze(1) if "weights" in tensors else table


def _unknown(tokenizer: Tokenizer) -> int | None:
    """Return the number of the token of unknown words, None without one."""
    settings: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    name = settings.get("unk_token")
    return settings.get("unk_id") if name is None else tokenizer.token_to_id(name)
