"""Train an encoder on sentences by WhitenedCSE or SimCSE, and write it as a folder for builds."""

import csv
import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import (
    discard,
    remove_killed,
    replace_folder,
    require_free,
    require_path,
)
from whiten_index.artifacts.files import is_folder, list_folder, resolved
from whiten_index.artifacts.limits import LimitError, check_expanded
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.batches import TextBatch
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import CURVES_FILE, RUN, TRAINED, local_model, require_local
from whiten_index.encoding.models import ENCODER_CLASSES, ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.errors import ConfigError, CorpusError, require_config, require_installed
from whiten_index.evaluation.sts_sets import StsSet, read_sts, require_ranked
from whiten_index.progress import Progress, Stages
from whiten_index.training.training_config import BEST, CURVES, POOLINGS, TrainingConfig

if TYPE_CHECKING:
    from whiten_index.training.trainer import Score

_PLACE_BYTES, _KEY_BYTES = 8, 40  # of a text in the list, and as a key
_files = functools.partial(manifest.listed_files, schema=TRAINED)
_WHAT, _REMEDY = "a trained model", "remove it to train from the start"
_STSB = "STS-B"


@dataclass(frozen=True)
class TrainReport:
    """Report of a training."""

    out: Path  # folder of the model
    facts: Mapping[str, Any]  # steps and scores, as JSON values
    stages: Stages  # seconds and steps
    again: bool = False  # whether the same model was there already

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

    Call it again to resume an interrupted training from its last checkpoint; the resulting weights
    are bit-identical.

    Args:
        config: options of the training.
        pairs: file or folder with STS-B, on whose dev split checkpoints are compared and the best
            is kept; None keeps the last.
        progress: receiver of the stages.

    Raises:
        ConfigError: the model, groups and batch do not go together, or the folder holds another
            training.
        CorpusError: the sentences or pairs cannot be used, or are fewer than a batch.
        EncoderError: the model cannot be found or loaded, has its own head, or diverges.
        WhiteningError: a batch cannot whiten its groups.
        ArtifactError: a checkpoint or the existing model is damaged.
        BusyError: another process trains to the same folder.
        StorageError: the disk is full or cannot be written.

    Examples:
        >>> config = TrainingConfig(
        ...     corpus="docs.parquet", model="all-MiniLM-L6-v2", out="trained",
        ...     batch_size=8, groups=96, max_steps=1,
        ... )  # fmt: skip
        >>> train_encoder(config).facts["steps"]
        1
    """
    require_config(config, TrainingConfig)
    stages = Stages(progress or Progress())
    spec, folder = require_trainable(config)
    from whiten_index.training.trainer import checkpoints

    dev = None if pairs is None else read_dev(pairs)
    corpus = ParquetCorpus.open(
        CorpusConfig(sources=config.corpus, text_columns=config.text_columns, limit=config.limit)
    )
    with stages.whole("read", corpus.rows):
        sentences = read_sentences(corpus, batch_size=config.batch_size)
    out = resolved(require_path(config.out))
    work = out.with_name(f"{out.name}.training")  # of checkpoints
    # Everything that the weights depend on.
    identity = {
        "model": spec.fingerprint,
        "sentences": _digest(sentences),
        "pairs": None if dev is None else _digest([*dev.first, *dev.second, *map(str, dev.scores)]),
        **config.identity(),
    }
    # Before anything is written.
    done = _finished(out, identity)
    if done is not None:
        remove_killed(out.parent, out)
    if done is not None and not is_folder(work):
        return TrainReport(out, done, stages, again=True)
    if done is None and {*_entries(work)} - {*checkpoints(work)}:
        raise ConfigError(
            f"{work}, where checkpoints go, holds something else, and is left as it is; move it "
            "away, or name another --out"
        )
    with only_writer(work, what="training"):
        # Another process may have finished it since.
        done = done or _finished(out, identity)
        try:
            facts = done or _train(
                config, spec, folder, sentences, dev, out=out, work=work, identity=identity,
                stages=stages,
            )  # fmt: skip
            for each in checkpoints(work):
                discard(each)
        finally:
            if not _entries(work):
                discard(work)
    return TrainReport(out, facts, stages, again=done is not None)


def read_sentences(corpus: ParquetCorpus, *, batch_size: int) -> list[str]:
    """Return the sentences of a corpus; rows without text are left out.

    Equal ones share their memory. Others may take 100 times the size of the files, or 1 GiB.
    """
    known, texts, size = dict[str, str](), list[str](), 0
    packed = sum(file.packed for file in corpus.files)
    try:
        for batch in corpus.batches():
            for text in batch.texts if isinstance(batch, TextBatch) else ():
                size += _PLACE_BYTES
                size += 0 if text in known else sys.getsizeof(text) + _KEY_BYTES
                texts.append(known.setdefault(text, text))
            check_expanded(size, packed)
    except LimitError as error:
        raise CorpusError(
            f"the sentences of the corpus are too many or too long: {error}; pass a --limit"
        ) from error
    if len(texts) < batch_size:
        raise CorpusError(
            f"the corpus has {len(texts)} sentences, fewer than a batch of {batch_size}; name "
            "more, or take smaller batches"
        )
    return texts


def require_trainable(config: TrainingConfig) -> tuple[EncoderSpec, ModelFolder]:
    """Return the model that is trained; refuse an impossible training before anything is read."""
    require_installed("torch", "transformers", by="training", extra="train")
    require_local(config.model, by="training")
    asked = EncoderConfig(
        model=config.model,
        revision=config.revision,
        pooling=config.pooling,
        # Sentences are trained without prompts, and the written model has none.
        document_prompt="",
        query_prompt="",
        trust_remote_code=config.trust_remote_code,
    )
    spec, folder = local_model(asked, by="training")
    if spec.pooling not in POOLINGS or spec.layers != (folder.layers,):
        raise ConfigError(
            f"{spec.model} pools by {spec.pooling} over layers {spec.layers}; training pools the "
            f"last layer by {' or '.join(POOLINGS)}: give --pooling"
        )
    if folder.head:
        raise ConfigError(
            f"{spec.model} has its own steps after its pooling, which training would leave "
            "out; train the transformer alone: take out its modules.json"
        )
    # Those saved without their decoder are loaded by another class than they are written by.
    alone = str(folder.config.get("model_type")) in ENCODER_CLASSES
    if alone or folder.config.get("is_encoder_decoder"):
        raise ConfigError(f"{spec.model} is an encoder-decoder; train an encoder such as BERT")
    from whiten_index.training.contrastive_model import head_whitening, require_device

    require_device(config)
    head_whitening(config, folder.hidden_size)
    return spec, folder


def read_dev(pairs: Path | str) -> StsSet:
    """Return the dev split of STS-B, on which checkpoints are compared."""
    try:
        (dev,) = (each for each in read_sts([pairs], splits={_STSB: "dev"}) if each.name == _STSB)
        require_ranked([dev])
    except (ConfigError, CorpusError) as error:
        raise type(error)(
            f"{pairs} gives no dev split of {_STSB} to compare checkpoints on ({error}); name a "
            "file of pairs that has it, with its scores"
        ) from error
    return dev


def _finished(out: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts of the model if it is there already."""
    if _files(out) is None:
        # Before hours of training, not after.
        require_free(out, files=_files, what=_WHAT)
        return None
    fields = manifest.read_manifest(out, TRAINED)
    names = {*fields["files"], RUN}
    manifest.check_files(out, fields, content=True, names=names, remedy=_REMEDY)
    found = manifest.read_json(out / RUN, what="a record of training")
    _require_same(found.pop("identity", None), identity, f"{out} holds a model trained")
    return found


def _require_same(then: Any, now: Mapping[str, Any], what: str) -> None:
    then = then if isinstance(then, dict) else {"identity": then}
    differ = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if differ:
        raise ConfigError(
            f"{what} with another {', '.join(differ)}; name another --out, or remove it to train "
            "from the start"
        )


def _entries(work: Path) -> list[Path]:
    """Return the entries of the folder of checkpoints except those of its lock."""
    return [each for each in list_folder(work) if not each.name.startswith((".lock", ".tmp-"))]


def _train(
    config: TrainingConfig, spec: EncoderSpec, folder: ModelFolder, sentences: Sequence[str],
    dev: StsSet | None, *, out: Path, work: Path, identity: Mapping[str, Any], stages: Stages,
) -> dict[str, Any]:  # fmt: skip
    """Train, from the last checkpoint if there is one, and write the model; return facts."""
    from whiten_index.training.contrastive_model import contrastive_model, write_model
    from whiten_index.training.trainer import checked_identity, run, written

    if (then := checked_identity(work)) is not None:
        _require_same(then, identity, f"{work} holds checkpoints of a training")
    with stages.stage("load encoder", 1):
        model, collator = contrastive_model(config, spec, folder)
    # Scored as the written model will be used.
    whole = replace(collator, max_length=spec.max_length)
    score = None if dev is None else _scorer(whole, dev)
    facts, curves = run(
        config, model, sentences, collator,
        score=score, folder=work, identity=identity, stages=stages,
    )  # fmt: skip
    facts = {"encoder": spec.model, "sentences": len(sentences), **facts}

    def make(path: Path) -> None:
        with written(path):
            write_model(path, model, spec, folder)
        with (path / CURVES_FILE).open("w", newline="") as file:
            writer = csv.DictWriter(file, CURVES, lineterminator="\n")
            writer.writeheader()
            writer.writerows(curves)
        manifest.write_json(path / RUN, {"identity": identity, **facts})
        fields = TRAINED.headed(files=manifest.describe_files(path))
        manifest.write_manifest(path / manifest.MANIFEST, fields)

    replace_folder(out, make, files=_files, what=_WHAT)
    return facts


def _scorer(collator: Any, dev: StsSet) -> "Score":
    """Return a function that scores a model on STS-B dev, with alignment and uniformity."""
    from whiten_index.evaluation.geometry_scores import POSITIVE_ABOVE, alignment, uniformity
    from whiten_index.evaluation.metrics import correlate, pair_cosines
    from whiten_index.training.contrastive_model import ContrastiveModel, embed

    pairs = dev.scored_pairs()
    place = {text: number for number, text in enumerate(dict.fromkeys(pairs.texts))}
    rows, others = ([place[text] for text in side] for side in (pairs.first, pairs.second))
    close = pairs.scores > POSITIVE_ABOVE

    def score(model: ContrastiveModel) -> dict[str, float]:
        found = embed(model, list(place), collator)
        a, b = found[rows], found[others]
        spearman, _ = correlate(
            pairs.scores, pair_cosines(a, b), pairs.subsets, averaged=False, name=_STSB
        )
        scores = {BEST: spearman["all"], "uniformity": uniformity(found)}
        return scores | ({"alignment": alignment(a[close], b[close])} if close.any() else {})

    return score


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for data in map(str.encode, texts):
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
