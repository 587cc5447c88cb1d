"""The model that is trained: an encoder, a head, and a loss over several views of each sentence."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from whiten_index.artifacts.files import walk_files
from whiten_index.encoding.export_st import (
    Module,
    flush,
    pooling_module,
    write_modules,
    write_settings,
    write_transformer,
)
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.pooling import Pooling, pool
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.transformer import load_transformer
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.training.group_whitening import ShuffledGroupWhitening
from whiten_index.training.sentences import Collator
from whiten_index.training.training_config import PositiveSum, Precision, TrainingConfig

Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """Whitening, where there is one, then a linear map and tanh.

    Attributes:
        whitening: of the features, None for SimCSE's head.
        dense: d to d.
    """

    def __init__(self, dim: int, whitening: ShuffledGroupWhitening | None) -> None:
        super().__init__()
        self.whitening = whitening
        self.dense = nn.Linear(dim, dim)
        # As the poolers of BERT are, which SimCSE's head takes the place of.
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return what the loss compares, of features (views, n, d)."""
        with torch.autocast(features.device.type, enabled=False):
            white = features.float() if self.whitening is None else self.whitening(features)
            out: Tensor = torch.tanh(self.dense(white))
        return out

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weight (d, d) and bias (d,) of what evaluation does before its tanh."""
        weight, bias = self.dense.weight.double(), self.dense.bias.double()
        if self.whitening is not None:
            map_, shift = self.whitening.folded()
            bias = bias + weight @ shift
            weight = weight @ map_
        return weight, bias


class ContrastiveModel(nn.Module):
    """Several views of each sentence of a batch, of which the first is pulled to the others.

    A view is a pass through the encoder, with dropout of its own, and a call of the head, with a
    permutation of its own. With fewer ``passes`` than views, views share passes by turns.

    Attributes:
        encoder: of transformers.
        pooling: tokens to features.
        head: features to what is compared.
        views: an anchor and its positives.
        passes: through the encoder.
    """

    def __init__(
        self,
        encoder: Any,
        head: Head,
        loss: Loss,
        *,
        pooling: Pooling = Pooling.CLS,
        views: int,
        passes: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.head, self.pooling = head, pooling
        self.views, self.passes = views, views if passes is None else passes
        self._loss = loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch.

        Args:
            input_ids: (n, t) tokens.
            attention_mask: (n, t).
        """
        flat = self.features(
            input_ids.repeat(self.passes, 1), attention_mask.repeat(self.passes, 1)
        )
        passes = flat.view(self.passes, -1, flat.shape[-1])
        views = passes
        if self.passes != self.views:
            views = torch.stack([passes[view % self.passes] for view in range(self.views)])
        compared = self.head(views)
        return {"loss": self._loss(compared[0], compared[1:])}

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the pooled features (n, d) of tokens (n, t), before the head."""
        out = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return pool(out.last_hidden_state, attention_mask, self.pooling)

    def embed(self, batch: Mapping[str, Tensor], *, with_head: bool) -> Tensor:
        """Return embeddings (n, d) of a batch, as the model that is written gives them."""
        features = self.features(batch["input_ids"], batch["attention_mask"])
        return self.head(features) if with_head else features


def info_nce(
    anchors: Tensor,
    positives: Tensor,
    *,
    temperature: float = 0.05,
    summed: PositiveSum = PositiveSum.OUTSIDE,
) -> Tensor:
    """Return the mean over anchors of the contrastive loss, by cosine similarity.

    With sim(i, j, p) the cosine of anchor i and the p-th positive of sentence j, over τ:

    - outside, equation 7: -1/m Σ_p log( exp sim(i, i, p) / Σ_j exp sim(i, j, p) );
    - inside, equation 8: -log( Σ_p exp sim(i, i, p) / Σ_p Σ_j exp sim(i, j, p) ).

    With one positive both are SimCSE's (Gao et al. 2021, equation 1).

    Args:
        anchors: (n, d).
        positives: (m, n, d); row i of each is a positive of anchor i.
        temperature: τ.
        summed: which of the two.
    """
    with torch.autocast(anchors.device.type, enabled=False):
        # (m, n, n): positive p of sentence j for anchor i
        similar = _unit(anchors) @ _unit(positives).mT / temperature
        own = similar.diagonal(dim1=1, dim2=2)
        if summed is PositiveSum.OUTSIDE:
            return (similar.logsumexp(2) - own).mean()
        return (torch.logsumexp(similar, (0, 2)) - own.logsumexp(0)).mean()


def _unit(features: Tensor) -> Tensor:
    wide = features if features.dtype == torch.float64 else features.float()
    return nn.functional.normalize(wide, dim=-1)


def contrastive_model(
    config: TrainingConfig, spec: EncoderSpec, folder: ModelFolder
) -> tuple[ContrastiveModel, Collator]:
    """Return the model, its head drawn by the seed, and what makes its batches.

    Raises:
        ConfigError: the groups do not divide the encoder's width, the device is not there or has
            no such precision, or nothing would tell the views of a sentence apart.
        WhiteningError: a batch cannot whiten its groups.
        EncoderError: the encoder cannot be loaded, or has no dropout where views need it.
    """
    require_device(config)
    # Before loading too: a checkpoint may lack a pooler, which is drawn then.
    transformers.set_seed(config.seed)
    whitening = whitening_of(config, folder.hidden_size)
    tokenizer, encoder = load_transformer(spec, folder, torch.device("cpu"))
    if tokenizer.pad_token_id is None:
        raise EncoderError(f"the tokenizer of {spec.model} has no padding, which batches need")
    if not all(tensor.isfinite().all() for tensor in encoder.state_dict().values()):
        raise EncoderError(f"{spec.model} has weights that are not finite; take another model")
    if not (whitening and whitening.shuffles) and not _drops(encoder):
        raise EncoderError(
            f"{spec.model} has no dropout, so that all views of a sentence are the same; set one "
            "in its config.json, or whiten with shuffled groups"
        )
    transformers.set_seed(config.seed)
    model = ContrastiveModel(
        encoder.train(),
        Head(folder.hidden_size, whitening),
        functools.partial(info_nce, temperature=config.temperature, summed=config.positive_sum),
        pooling=Pooling(spec.pooling),
        views=config.views,
        passes=config.passes,
    )
    return model, Collator(
        tokenizer, min(config.max_length, spec.max_length), lower_case=spec.lower_case
    )


def whitening_of(config: TrainingConfig, dim: int) -> ShuffledGroupWhitening | None:
    """Return what whitens features of d = ``dim`` channels, None where nothing does.

    Raises:
        ConfigError: the groups do not divide the channels, or views that share a pass are equal.
        WhiteningError: a batch cannot whiten the groups.
    """
    whitening = _whitening(config, dim) if config.whiten else None
    shared = config.passes is not None and config.passes < config.views
    if shared and not (whitening and whitening.shuffles):
        raise ConfigError(
            f"without channels shuffled into groups of several, but not all, {config.passes} "
            f"passes give {config.views} views of which some are the same; leave --passes out, or "
            "shuffle"
        )
    return whitening


def _whitening(config: TrainingConfig, dim: int) -> ShuffledGroupWhitening:
    whitening = ShuffledGroupWhitening(
        dim,
        **config.chosen_groups(),
        group_map=config.group_map,
        shuffle=config.shuffle,
        epsilon=config.epsilon,
        shrinkage=config.shrinkage,
        momentum=config.momentum,
    )
    whitening.require_enough(config.batch_size)
    return whitening


def require_device(config: TrainingConfig) -> None:
    """Refuse a device that is not there, or a precision that it does not have.

    Raises:
        ConfigError: it is so.
    """
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError("torch sees no GPU; give device cpu or auto, or mend the driver")
    used = there and config.device != "cpu"
    if config.precision is Precision.BF16 and used and not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU has no bf16; give precision fp16 or float32")
    if config.precision is Precision.FP16 and not used:
        raise ConfigError("fp16 is for GPUs; give precision bf16 or float32")


def _drops(encoder: Any) -> bool:
    """Tell whether two passes differ: what an encoder says of its dropout has many names."""
    encoder.train()
    tokens = torch.ones((2, 8), dtype=torch.long)
    with torch.no_grad():
        one, other = (
            encoder(input_ids=tokens, attention_mask=tokens).last_hidden_state for _ in range(2)
        )
    return not torch.equal(one, other)


def write_model(
    path: Path,
    model: ContrastiveModel,
    spec: EncoderSpec,
    folder: ModelFolder,
    *,
    keep_head: bool,
) -> None:
    """Write the encoder, its pooling and, where asked for, its head as one ``Dense``.

    The head's whitening by its running moments is affine, and so is what follows it up to tanh:
    together they are one linear map.
    """
    path.mkdir()
    write_transformer(path, spec, folder, weights=False)
    settings = (path / "config.json").read_bytes()
    model.encoder.save_pretrained(path)
    # As the model's own, not as transformers writes it anew.
    (path / "config.json").write_bytes(settings)
    modules = [pooling_module(spec, folder.hidden_size)]
    if keep_head:
        weight, bias = model.head.folded()
        config = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        arrays = {
            "linear.weight": weight.detach().float().cpu().numpy(),
            "linear.bias": bias.detach().float().cpu().numpy(),
        }
        modules.append(Module("Dense", config, arrays))
    if spec.normalizes:
        modules.append(Module("Normalize"))
    write_modules(path, modules)
    write_settings(path, spec)
    # Some releases of safetensors write files that none but their owner may read.
    umask = os.umask(0o22)
    os.umask(umask)
    for file in walk_files(path):
        if file.suffix == ".safetensors":
            file.chmod(0o666 & ~umask)
    flush(path)


_EMBEDDED_AT_ONCE = 128


@torch.no_grad()
def embed(
    model: ContrastiveModel, texts: Sequence[str], collator: Collator, *, with_head: bool
) -> NDArray[np.float32]:
    """Return embeddings (n, d) in evaluation, longest texts together; nothing is drawn."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    out: NDArray[np.float32] | None = None
    for start in range(0, len(order), _EMBEDDED_AT_ONCE):
        numbers = order[start : start + _EMBEDDED_AT_ONCE]
        batch = collator([texts[number] for number in numbers])
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        found = model.embed(moved, with_head=with_head).float().cpu().numpy()
        if out is None:
            out = np.empty((len(texts), found.shape[1]), dtype=np.float32)
        out[numbers] = found
    model.train(training)
    assert out is not None
    return out
