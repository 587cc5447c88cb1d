"""Sentences to a trained encoder: WhitenedCSE, or SimCSE, written as any build takes it."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import discard, replace_folder, require_free
from whiten_index.artifacts.files import is_file, list_folder, require_path, resolved, writing
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import Described, Schema
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec, resolve_encoder
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, FormatError
from whiten_index.evaluation.sts_sets import StsSet, read_sts, require_ranked
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.training.training_config import BEST, POOLINGS, TrainingConfig

if TYPE_CHECKING:
    from whiten_index.training.contrastive_model import ContrastiveModel
    from whiten_index.training.sentences import Sentences
    from whiten_index.training.trainer import Score

KIND, FORMAT_VERSION = "trained model", 1
RUN, CURVES, _CHECKPOINTS = "training.json", "curves.csv", "checkpoints"
_SCHEMA = Schema(KIND, FORMAT_VERSION, Described)
_WHAT, _REMEDY = "a trained model", "remove it to train anew"
_RECORD = "checkpoints of a training"
_OF_ACCELERATE = (
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP",
)  # fmt: skip
_STSB = "STS-B"


@dataclass(frozen=True)
class TrainReport:
    """What a training did.

    Attributes:
        out: folder of the model.
        facts: what it came to, as JSON values.
        stages: seconds and steps.
        again: whether it was there already, trained in the same way.
    """

    out: Path
    facts: Mapping[str, Any]
    stages: Stages
    again: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "out": str(self.out),
            "already_there": self.again,
            **self.facts,
            "seconds": self.stages.seconds,
        }


def train_encoder(
    config: TrainingConfig, *, pairs: Path | str | None = None, progress: Progress | None = None
) -> TrainReport:
    """Train an encoder, and write it as a folder of sentence-transformers.

    What is interrupted is gone on with by the same call, from its last checkpoint.

    Args:
        config: of the training.
        pairs: file or folder with STS-B, on whose dev split checkpoints are compared and the best
            is kept; None keeps the last.
        progress: who is told of the stages.

    Raises:
        ConfigError: the model, groups and batch do not go together, or the folder holds another
            training.
        CorpusError: the sentences or pairs cannot be used, or are fewer than a batch.
        EncoderError: the model cannot be found or loaded, has a head of its own, or diverges.
        WhiteningError: a batch cannot whiten its groups.
        ArtifactError: a checkpoint, or the model that is there, is damaged.
        BusyError: another process trains to the same folder.
        StorageError: the disk is full or cannot be written.

    Example:
        >>> config = TrainingConfig(
        ...     corpus="docs.parquet", model="all-MiniLM-L6-v2", out="trained",
        ...     batch_size=8, groups=96, max_steps=1,
        ... )  # fmt: skip
        >>> train_encoder(config).facts["steps"]
        1
    """
    stages = Stages(progress or Silent())
    spec, folder = require_trainable(config)
    dev = None if pairs is None else read_dev(pairs)
    corpus = ParquetCorpus.open(
        CorpusConfig(sources=config.corpus, text_columns=config.text_columns, limit=config.limit)
    )
    with stages.stage("read", corpus.rows) as watcher:
        from whiten_index.training.sentences import Sentences

        sentences = Sentences.of(corpus, batch_size=config.batch_size)
        watcher.advance(corpus.rows)
    training = _Training(config, spec, folder, sentences, dev)
    # Before anything is written.
    done = training.finished()
    if done is not None and not training.left_something:
        return TrainReport(training.out, done, stages, again=True)
    training.require_own_place()
    with only_writer(training.work, what="training"):
        # Another process may have ended it since.
        done = done or training.finished()
        try:
            facts = done or training.do(stages)
        except BaseException:
            if not training.begun:
                training.clear()
            raise
        training.clear()
    return TrainReport(training.out, facts, stages, again=done is not None)


def _require_installed() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            "training needs accelerate, which is not installed; run: pip install "
            "'whiten-index[train]'"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1" or "LOCAL_RANK" in os.environ:
        raise ConfigError(
            "training is one process on one device; start it without torchrun, and unset "
            "WORLD_SIZE and LOCAL_RANK"
        )
    for name in _OF_ACCELERATE:
        if os.environ.get(name, "no").lower() not in ("", "no", "false"):
            raise ConfigError(f"{name} is set, which would change the training; unset it")


def model_of(config: TrainingConfig) -> tuple[EncoderSpec, ModelFolder]:
    """Return the model that is trained, with the pooling that counts."""
    asked = EncoderConfig(
        model=config.model,
        revision=config.revision,
        pooling=config.pooling,
        # Sentences are trained without any, and so is what is written.
        document_prompt="",
        query_prompt="",
        trust_remote_code=config.trust_remote_code,
    )
    spec, folder = resolve_encoder(asked)
    if spec.pooling not in POOLINGS or spec.layers != (folder.layers,):
        raise ConfigError(
            f"{spec.model} pools by {spec.pooling} over layers {spec.layers}; training pools the "
            f"last layer by {' or '.join(POOLINGS)}: give --pooling"
        )
    if any(step.kind != "Normalize" for step in folder.head):
        raise ConfigError(
            f"{spec.model} has steps of its own behind its pooling, which training would leave "
            "out; train the transformer alone: take out its modules.json"
        )
    if folder.config.get("is_encoder_decoder"):
        raise ConfigError(f"{spec.model} is an encoder-decoder; train an encoder such as BERT")
    return spec, folder


def require_trainable(config: TrainingConfig) -> tuple[EncoderSpec, ModelFolder]:
    """Return the model that is trained; refuse what cannot be, before anything is read.

    Raises:
        ConfigError: see ``train_encoder``.
        EncoderError: the model cannot be found, or has a head of its own.
        WhiteningError: a batch cannot whiten its groups.
    """
    _require_installed()
    spec, folder = model_of(config)
    from whiten_index.training.contrastive_model import require_device, whitening_of

    require_device(config)
    whitening_of(config, folder.hidden_size)
    return spec, folder


def read_dev(pairs: Path | str) -> StsSet:
    """Return the dev split of STS-B, which checkpoints are compared on.

    Raises:
        ConfigError: there is none.
        CorpusError: it cannot be used.
    """
    try:
        (dev,) = (each for each in read_sts([pairs], splits={_STSB: "dev"}) if each.name == _STSB)
        require_ranked([dev])
    except (ConfigError, CorpusError) as error:
        raise type(error)(
            f"{pairs} gives no dev split of {_STSB} to compare checkpoints on ({error}); name a "
            "file of pairs that has it, with its scores"
        ) from error
    return dev


@dataclass(frozen=True)
class _Training:
    """A training with what it is of: where it stands, and what it is known by.

    Attributes:
        config: of the training.
        spec: of the encoder as it was.
        folder: likewise.
        sentences: to train on.
        dev: pairs that checkpoints are compared on, None for none.
    """

    config: TrainingConfig
    spec: EncoderSpec
    folder: ModelFolder
    sentences: Sentences
    dev: StsSet | None

    @property
    def out(self) -> Path:
        """Folder of the model."""
        return resolved(require_path(self.config.out))

    @property
    def work(self) -> Path:
        """Folder of what it is gone on from."""
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        from whiten_index.training.checkpoints import any_whole

        return any_whole(self.work / _CHECKPOINTS)

    @property
    def left_something(self) -> bool:
        """Whether there are checkpoints of some training, or what one left when it died."""
        return self._record() is not None

    @functools.cached_property
    def identity(self) -> Mapping[str, Any]:
        """What the weights depend on, as JSON values."""
        values = {
            "model": self.spec.fingerprint,
            "sentences": _digest(self.sentences.texts),
            "pairs": None if self.dev is None else _digest_of(self.dev),
            **self.config.identity(),
        }
        found: Mapping[str, Any] = json.loads(json.dumps(values))
        return found

    def finished(self) -> dict[str, Any] | None:
        """Return what it came to if it is there already, None where nothing is.

        Raises:
            ConfigError: a model is there that was trained in another way, or something else is.
        """
        if _files(self.out) is None:
            # Before hours of training, not after.
            require_free(self.out, files=_files, what=_WHAT)
            return None
        fields = manifest.read_manifest(self.out, _SCHEMA)
        manifest.check_files(self.out, fields, content=True, remedy=_REMEDY)
        found = manifest.read_json(self.out / RUN, what="a record of training")
        self._require_mine(_identity(found), where=self.out, what="a model trained")
        return found

    def do(self, stages: Stages) -> dict[str, Any]:
        """Train, from the last checkpoint if there is one, and write the model; return facts."""
        self._require_checkpoints()
        from whiten_index.training.contrastive_model import contrastive_model
        from whiten_index.training.trainer import run

        with stages.stage("load encoder", 1):
            model, collator = contrastive_model(self.config, self.spec, self.folder)
        # As the model that is written will be used.
        whole = replace(collator, max_length=self.spec.max_length)
        score = None if self.dev is None else _scorer(self.config, whole, self.dev)
        ended = run(
            self.config, model, self.sentences, collator,
            score=score, folder=self.work / _CHECKPOINTS, stages=stages,
        )  # fmt: skip
        facts = {
            "encoder": self.spec.model,
            "sentences": len(self.sentences),
            "steps": ended.steps,
            "best_step": ended.best_step,
            BEST: ended.best,
            "stsb_dev_before": next((row[BEST] for row in ended.curves if BEST in row), None),
            "resumed_at": ended.resumed,
        }
        self._write(model, ended.curves, facts)
        return facts

    def clear(self) -> None:
        """Remove what it was gone on from, and the folder if that is all."""
        with writing(self.work, kept=""):
            if self.left_something:
                discard(self.work / _CHECKPOINTS)
                (self.work / RUN).unlink(missing_ok=True)
            if not self._others():
                discard(self.work)

    def require_own_place(self) -> None:
        """Refuse to put checkpoints into a folder of something else.

        Raises:
            ConfigError: it is one.
        """
        if self._others() and self._record() is None:
            raise ConfigError(
                f"{self.work}, where checkpoints go, holds something else, and is left as it is; "
                "move it away, or name another --out"
            )

    def _others(self) -> list[Path]:
        """Return what is in the folder of checkpoints beside the files of its lock."""
        return [p for p in list_folder(self.work) if not p.name.startswith((".lock", ".tmp-"))]

    def _record(self) -> Mapping[str, Any] | None:
        """Return what tells whose the checkpoints are, None where nothing does."""
        path = self.work / RUN
        if not is_file(path):
            return None
        found = manifest.read_json(path, what=_RECORD, remedy="remove the folder to train anew")
        return _identity(found) if found.get("kind") == _RECORD else None

    def _write(
        self,
        model: ContrastiveModel,
        curves: Sequence[Mapping[str, float]],
        facts: Mapping[str, Any],
    ) -> None:
        def make(path: Path) -> None:
            from whiten_index.training.checkpoints import written
            from whiten_index.training.contrastive_model import write_model
            from whiten_index.training.trainer import write_curves

            with written(path):
                write_model(path, model, self.spec, self.folder, keep_head=self.config.keep_head)
            write_curves(path / CURVES, curves)
            manifest.write_json(path / RUN, {"identity": dict(self.identity), **facts})
            files = manifest.describe_files(path)
            fields = {"kind": KIND, "format_version": FORMAT_VERSION, "files": files}
            manifest.write_manifest(path / manifest.MANIFEST, fields)

        replace_folder(self.out, make, files=_files, what=_WHAT)

    def _require_checkpoints(self) -> None:
        """Refuse to go on from the checkpoints of another training; note which this one is."""
        if self.begun:
            self._require_mine(self._record() or {}, where=self.work, what=_RECORD)
        else:
            path = self.work / RUN
            with writing(path, kept=""):
                manifest.write_json(path, {"kind": _RECORD, "identity": dict(self.identity)})

    def _require_mine(self, then: Mapping[str, Any], *, where: Path, what: str) -> None:
        now = self.identity
        differ = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
        if differ:
            raise ConfigError(
                f"{where} holds {what} with another {', '.join(differ)}; name another --out, or "
                "remove it to train anew"
            )


def _scorer(config: TrainingConfig, collator: Any, dev: StsSet) -> Score:
    """Return what scores a model: STS-B dev, alignment of its close pairs, uniformity."""
    from whiten_index.evaluation.geometry_scores import POSITIVE_ABOVE, alignment, uniformity
    from whiten_index.evaluation.sts_scores import correlate, pair_cosines
    from whiten_index.training.contrastive_model import embed

    chosen = [row for row, scored in enumerate(dev.scored) if scored]
    first, second = ([texts[row] for row in chosen] for texts in (dev.first, dev.second))
    gold = dev.scores[chosen]
    texts = list(dict.fromkeys([*first, *second]))
    place = {text: number for number, text in enumerate(texts)}
    rows, others = ([place[text] for text in side] for side in (first, second))
    close = gold > POSITIVE_ABOVE

    def score(model: ContrastiveModel) -> dict[str, float]:
        found = embed(model, texts, collator, with_head=config.keep_head)
        a, b = found[rows], found[others]
        spearman = correlate(
            gold, pair_cosines(a, b), ["dev"] * len(gold), averaged=False, name=_STSB
        )
        scores = {BEST: 100 * spearman.all, "uniformity": uniformity(found)}
        return scores | ({"alignment": alignment(a[close], b[close])} if close.any() else {})

    return score


def _identity(record: dict[str, Any]) -> Mapping[str, Any]:
    """Take the identity out of a record of training; one that is no object differs from any."""
    found = record.pop("identity", None)
    return found if isinstance(found, dict) else {"identity": found}


def _files(folder: Path) -> set[str] | None:
    """Return the files of a folder with a trained model, None of another one."""
    try:
        fields = manifest.read_manifest(folder, _SCHEMA)
    except FormatError:
        raise
    except ArtifactError:
        return None
    return {manifest.MANIFEST, *fields["files"]}


def _digest(texts: Any) -> str:
    """Return a digest of sentences in Arrow, whatever their chunks."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.as_py().encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _digest_of(dev: StsSet) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for first, second, score in zip(dev.first, dev.second, dev.scores, strict=True):
        digest.update(f"{first}\x00{second}\x00{score}\x00".encode())
    return digest.hexdigest()
