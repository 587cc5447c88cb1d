"""The model in training: an encoder, a head, and a loss over several views of each sentence."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from whiten_index.artifacts.files import walk_files
from whiten_index.artifacts.prefetch import blocks
from whiten_index.encoding.export_st import Module, flush, pooling_module, write_folder
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.pooling import pool
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.tokenization import require_known_tokens, tokenizing
from whiten_index.encoding.transformer import load_transformer
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.training.group_whitening import ShuffledGroupWhitening
from whiten_index.training.training_config import TrainingConfig

_EMBEDDED_AT_ONCE = 128


@dataclass(frozen=True)
class Collator:
    """Tokenises the sentences of a batch, padded to the longest."""

    tokenizer: Any
    spec: EncoderSpec
    max_length: int
    vocabulary: int | None  # tokens that the model knows

    @tokenizing()
    def __call__(self, sentences: Sequence[str]) -> Mapping[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, both (n, t)."""
        tokens = self.tokenizer(
            list(sentences),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        require_known_tokens(ids.numpy(), ids.shape[1], self.spec, self.vocabulary)
        return {"input_ids": ids, "attention_mask": mask}


class Head(nn.Module):
    """Whitening, None for SimCSE's head, then a linear map of d to d, then tanh."""

    def __init__(self, dim: int, whitening: ShuffledGroupWhitening | None) -> None:
        super().__init__()
        self.whitening = whitening
        self.dense = nn.Linear(dim, dim)
        # As in the poolers of BERT, which SimCSE's head replaces.
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the vectors that the loss compares, of features (views, n, d)."""
        with torch.autocast(features.device.type, enabled=False):
            white = features.float() if self.whitening is None else self.whitening(features)
            out: Tensor = torch.tanh(self.dense(white))
        return out


class ContrastiveModel(nn.Module):
    """Several views of each sentence: an anchor, which is pulled to the others, its positives.

    A view is a pass through the encoder, with its own dropout, and a call of the head, with its own
    permutation.
    """

    def __init__(
        self, encoder: Any, head: Head, *, temperature: float, pooling: str, views: int
    ) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.head, self.pooling, self.views = head, pooling, views
        self._temperature = temperature

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the loss of a batch, both (n, t)."""
        flat = self.features(input_ids.repeat(self.views, 1), attention_mask.repeat(self.views, 1))
        compared = self.head(flat.view(self.views, -1, flat.shape[-1]))
        return info_nce(compared[0], compared[1:], temperature=self._temperature)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the pooled features (n, d) of tokens (n, t), before the head."""
        out = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return pool(out.last_hidden_state, attention_mask, self.pooling)


def info_nce(anchors: Tensor, positives: Tensor, *, temperature: float) -> Tensor:
    """Return the mean over anchors of the contrastive loss, by cosine similarity.

    With sim(i, j, p) the cosine of anchor i and the p-th positive of sentence j, over τ, it is
    -1/m Σ_p log( exp sim(i, i, p) / Σ_j exp sim(i, j, p) ), equation 7 of the paper. With one
    positive it is SimCSE's (Gao et al. 2021, equation 1). Anchors are (n, d), positives (m, n, d);
    row i of each positive belongs to anchor i.
    """
    with torch.autocast(anchors.device.type, enabled=False):
        # (m, n, n): positive p of sentence j for anchor i
        similar = _unit(anchors) @ _unit(positives).mT / temperature
        own = similar.diagonal(dim1=1, dim2=2)
        return (similar.logsumexp(2) - own).mean()


def _unit(features: Tensor) -> Tensor:
    wide = features if features.dtype == torch.float64 else features.float()
    return nn.functional.normalize(wide, dim=-1)


def contrastive_model(
    config: TrainingConfig, spec: EncoderSpec, folder: ModelFolder
) -> tuple[ContrastiveModel, Collator]:
    """Return the model, its head drawn by the seed, and the collator of its batches."""
    # Before loading too: a pooler that a checkpoint lacks is drawn then.
    transformers.set_seed(config.seed)
    whitening = head_whitening(config, folder.hidden_size)
    tokenizer, encoder = load_transformer(spec, folder, torch.device("cpu"))
    folder.require_unchanged()
    if tokenizer.pad_token_id is None:
        raise EncoderError(f"the tokenizer of {spec.model} has no padding, which batches need")
    if not (whitening and whitening.shuffles) and not _drops(encoder):
        raise EncoderError(
            f"{spec.model} has no dropout, so that all views of a sentence are the same; set one "
            "in its config.json, or whiten with shuffled groups"
        )
    transformers.set_seed(config.seed)
    model = ContrastiveModel(
        encoder.train(),
        Head(folder.hidden_size, whitening),
        temperature=config.temperature,
        pooling=spec.pooling,
        views=config.views,
    )
    vocabulary = getattr(encoder.get_input_embeddings(), "num_embeddings", None)
    return model, Collator(
        tokenizer, spec, max_length=min(config.max_length, spec.max_length), vocabulary=vocabulary
    )


def head_whitening(config: TrainingConfig, dim: int) -> ShuffledGroupWhitening | None:
    """Return the whitening of features of ``dim`` channels, None for SimCSE."""
    if not config.whiten:
        return None
    if dim % config.groups:
        fitting = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
        raise ConfigError(
            f"{config.groups} groups do not divide {dim} channels; give one of {fitting}"
        )
    whitening = ShuffledGroupWhitening(
        dim,
        groups=config.groups,
        group_map=config.group_map,
        shuffle=config.shuffle,
        shrinkage=config.shrinkage,
    )
    whitening.require_enough(config.batch_size)
    return whitening


def require_device(config: TrainingConfig) -> None:
    """Refuse a device that this machine lacks, or a precision that the device lacks."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError("torch sees no GPU; give device cpu or auto, or repair the driver")
    used = there and config.device != "cpu"
    if config.precision == "bf16" and used and not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU has no bf16; give precision fp16 or float32")
    if config.precision == "fp16" and not used:
        raise ConfigError("fp16 is for GPUs; give precision bf16 or float32")


def _drops(encoder: Any) -> bool:
    """Return whether two passes differ; the settings of dropout have many names."""
    encoder.train()
    tokens = torch.ones((2, 8), dtype=torch.long)
    with torch.no_grad():
        one, other = (
            encoder(input_ids=tokens, attention_mask=tokens).last_hidden_state for _ in range(2)
        )
    return not torch.equal(one, other)


def write_model(
    path: Path, model: ContrastiveModel, spec: EncoderSpec, folder: ModelFolder
) -> None:
    """Write the encoder and its pooling; the head has served."""
    modules = [pooling_module(spec, folder.hidden_size)]
    if spec.normalizes:
        modules.append(Module("Normalize"))
    write_folder(path, spec, folder, modules, weights=False)
    settings = (path / "config.json").read_bytes()
    model.encoder.save_pretrained(path)
    # The model's own settings, not those that transformers writes.
    (path / "config.json").write_bytes(settings)
    # Some releases of safetensors write files that only their owner may read.
    umask = os.umask(0o22)
    os.umask(umask)
    for file in walk_files(path):
        if file.suffix == ".safetensors":
            file.chmod(0o666 & ~umask)
    flush(path)


@torch.no_grad()
def embed(model: ContrastiveModel, texts: Sequence[str], collator: Collator) -> NDArray[np.float32]:
    """Return embeddings (n, d) as the written model gives them; nothing random is drawn."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    found = []
    for some in blocks(order, _EMBEDDED_AT_ONCE):
        batch = collator([texts[number] for number in some])
        features = model.features(**{name: tensor.to(device) for name, tensor in batch.items()})
        found.append(features.float().cpu().numpy())
    model.train(training)
    out: NDArray[np.float32] = np.concatenate(found)[np.argsort(order)]
    return out
