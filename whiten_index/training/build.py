"""The model to be trained, of an encoder and a configuration."""

from __future__ import annotations

import functools

import torch
import transformers

from whiten_index.encoding import EncoderSpec, ModelFolder
from whiten_index.encoding.pooling import Pooling
from whiten_index.encoding.transformer import load_transformer
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.training.config import Precision, TrainingConfig
from whiten_index.training.group_whitening import ShuffledGroupWhitening
from whiten_index.training.losses import info_nce
from whiten_index.training.model import ContrastiveModel, Head
from whiten_index.training.sentences import Collator


def contrastive_model(
    config: TrainingConfig, spec: EncoderSpec, folder: ModelFolder
) -> tuple[ContrastiveModel, Collator]:
    """Return the model, its head drawn by the seed, and what makes its batches.

    Raises:
        ConfigError: the groups do not divide the encoder's width, or the device is not there or
            has no such precision.
        WhiteningError: a batch cannot whiten its groups.
        EncoderError: the encoder cannot be loaded.
    """
    _require_device(config)
    # Before loading too: a checkpoint may lack a pooler, which is drawn then.
    transformers.set_seed(config.seed)
    whitening = None
    if config.whiten:
        whitening = ShuffledGroupWhitening(
            folder.hidden_size,
            **config.chosen_groups(),
            group_map=config.group_map,
            shuffle=config.shuffle,
            epsilon=config.epsilon,
            shrinkage=config.shrinkage,
            momentum=config.momentum,
        )
        whitening.require_enough(config.batch_size)
        _require_views_differ(config, whitening)
    tokenizer, encoder = load_transformer(spec, folder, torch.device("cpu"))
    if tokenizer.pad_token_id is None:
        raise EncoderError(f"the tokenizer of {spec.model} has no padding, which batches need")
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


def _require_device(config: TrainingConfig) -> None:
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError("torch sees no GPU; give device cpu or auto, or mend the driver")
    if config.precision is Precision.BF16 and there and not torch.cuda.is_bf16_supported():
        raise ConfigError("this GPU has no bf16; give precision fp16 or float32")
    if config.precision is Precision.FP16 and (config.device == "cpu" or not there):
        raise ConfigError("fp16 is for GPUs; give precision bf16 or float32")


def _require_views_differ(config: TrainingConfig, whitening: ShuffledGroupWhitening) -> None:
    """Refuse one pass where permutations change nothing."""
    if config.passes == 1 and 1 in (whitening.groups, whitening.group_size):
        raise ConfigError(
            "with one pass, and groups of one channel or of all, all views of a sentence are the "
            "same; give 2 passes or more, or other groups"
        )
