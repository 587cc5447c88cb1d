"""The model to be trained, of an encoder and a configuration."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.pooling import Pooling
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.transformer import load_transformer
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.training.group_whitening import ShuffledGroupWhitening
from whiten_index.training.model import ContrastiveModel, Head, info_nce
from whiten_index.training.sentences import Collator
from whiten_index.training.training_config import Precision, TrainingConfig


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
