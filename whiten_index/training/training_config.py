"""Options of a training."""

from typing import Any, Literal

from whiten_index.encoding.encoder_config import ModelOptions
from whiten_index.errors import ConfigError
from whiten_index.options import CORPUS, MODEL, RESOURCES, Positive, Share, option, schema

HEAD, LOSS, TRAINING = "Head", "Loss", "Training"
# Score that checkpoints are compared by: Spearman's correlation × 100.
BEST = "stsb_dev"
# Columns of the learning curves.
CURVES = ("step", "epoch", "loss", "learning_rate", BEST, "alignment", "uniformity")
POOLINGS = ("cls", "mean")
# Not part of the identity of trained weights, or identified by fingerprints.
_NO_PART = ("corpus", "out", "text_columns", "model", "revision", "trust_remote_code", "device",
            "limit", "save_steps")  # fmt: skip

_LAST_SEED, _MOST_EPOCHS = 2**32 - 1, 1e6
_OF_WHITENING = ("groups", "group_map", "shuffle", "shrinkage")


# Maps that whiten a group; both give covariance I, and differ by a rotation. zca is UΛ^(-1/2)Uᵀ,
# nearest to what it is given. pca is Λ^(-1/2)Uᵀ, whose rotation counts as constant in the gradient,
# since that of eigenvectors does not exist where eigenvalues are equal.
GroupMap = Literal["zca", "pca"]
# Types that the encoder computes in during training; weights are float32 in any case.
Precision = Literal["float32", "bf16", "fp16"]


@schema
class TrainingConfig(ModelOptions):
    """Options of a training; the defaults are the paper's for BERT-base.

    Raises:
        ConfigError: a value is out of bounds, or two options exclude each other.

    Examples:
        >>> TrainingConfig(corpus="sentences.parquet", out="model", positives=1).views
        2
    """

    corpus: tuple[str, ...]
    out: str
    text_columns: tuple[str, ...] = option(
        "Column of the sentences; may be repeated.", CORPUS, default=("text",), flag="--text-column"
    )
    limit: Positive | None = option("Use only the first N sentences.", CORPUS, default=None)
    pooling: Literal["cls", "mean"] | None = option(
        "The paper pools by cls; most sentence-transformers models by mean.", MODEL, default="cls"
    )
    max_length: int = option(
        "Tokens of a sentence, special tokens included.", MODEL, default=32, ge=3
    )
    whiten: bool = option(
        "Whiten in the head; without it, --positives 1 is SimCSE.", HEAD, default=True
    )
    groups: Positive = option("Groups of channels.", HEAD, default=128)
    group_map: GroupMap = option("Map that whitens a group.", HEAD, default="zca")
    shuffle: bool = option("Permute the channels at each call.", HEAD, default=True)
    shrinkage: Share = option(
        "Towards a multiple of I; needed by batches not larger than a group.", HEAD, default=0.0
    )
    positives: Positive = option("Positives of each sentence.", LOSS, default=3)
    temperature: float = option("Of the similarities.", LOSS, default=0.05, gt=0)
    batch_size: int = option("Sentences of a batch.", TRAINING, default=64, ge=2)
    epochs: float = option(
        "Passes over the sentences.", TRAINING, default=1.0, gt=0, le=_MOST_EPOCHS
    )
    max_steps: Positive | None = option("Stop after N steps.", TRAINING, default=None)
    learning_rate: float = option(
        "Peak, from which it falls to 0 linearly.", TRAINING, default=3e-5, gt=0
    )
    precision: Precision = option(
        "Of the encoder; head and loss are in float32.", TRAINING, default="float32"
    )
    eval_steps: Positive = option("Steps between evaluations.", TRAINING, default=125)
    save_steps: Positive = option(
        "Steps between checkpoints in OUT.training, from which a run resumes.",
        TRAINING,
        default=500,
    )
    seed: int = option("Of every random draw.", TRAINING, default=0, ge=0, le=_LAST_SEED)
    device: Literal["auto", "cpu", "cuda"] = option(
        "Device of the training.", RESOURCES, default="auto"
    )

    def __post_init__(self) -> None:
        if not self.corpus:
            raise ConfigError("no sentences are named; name Parquet files or folders")

    @property
    def views(self) -> int:
        """An anchor and its positives."""
        return self.positives + 1

    def identity(self) -> dict[str, Any]:
        """Return what the trained weights depend on, as JSON values, but the model and corpus."""
        values = {key: value for key, value in vars(self).items() if key not in _NO_PART}
        # What has no effect is the same.
        if not self.whiten:
            values |= dict.fromkeys(_OF_WHITENING)
        return values | ({"epochs": None} if self.max_steps else {})
