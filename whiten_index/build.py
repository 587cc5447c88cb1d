"""The main job: corpus → store → moments → whitening → FAISS → published index."""

from __future__ import annotations

import contextlib
import datetime
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import whiten_index
from whiten_index import index as faiss_index
from whiten_index.assemble import Assembled, IndexPlan, assemble_index
from whiten_index.choosing import Labels
from whiten_index.config import BuildConfig
from whiten_index.corpus import ParquetCorpus
from whiten_index.diagnose import geometry
from whiten_index.encode import (
    Counts,
    EncodeReport,
    encode_corpus,
    encode_shards,
    open_corpus,
    raw_bytes,
)
from whiten_index.encoding import resolve_encoder
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.fit import (
    Fitted,
    choose_index,
    fit_whitening,
    possible_widths,
    read_labels,
)
from whiten_index.lock import only_writer
from whiten_index.manifest import fingerprint
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.store import EmbeddingStore

__all__ = ["BuildConfig", "BuildReport", "build_index", "encode_corpus"]


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    Attributes:
        out: the index folder.
        version: the published version.
        up_to_date: whether that version was there already, made of the same inputs and choices.
        manifest: of the version.
        encoded: the report of its first half.
    """

    out: Path
    version: str
    up_to_date: bool
    manifest: dict[str, Any]
    encoded: EncodeReport

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "out": str(self.out),
            "store": str(self.encoded.store.root),
            "version": self.version,
            "up_to_date": self.up_to_date,
            "counts": self.encoded.counts.to_json(),
            "agreement": self.encoded.agreement,
            "compiled": self.encoded.compiled,
            "rows": self.encoded.record.rows,
            "whitening": self.manifest["whitening"],
            "choice": self.manifest.get("choice"),
            "factory": self.manifest["factory"],
            "bytes": self.manifest["bytes"],
            "made_by": self.manifest["made_by"],
            "seconds": self.encoded.stages.seconds,
            "stage_rows": self.encoded.stages.rows,
        }


@dataclass(frozen=True)
class _Settled:
    """What is settled before FAISS starts: the transform, the index to build, their identity."""

    fitted: Fitted
    plan: IndexPlan
    identity: str


def build_index(config: BuildConfig, *, progress: Progress | None = None) -> BuildReport:
    """Build and publish an index; what is done already is found and not done again.

    Args:
        config: ``out`` must be there, and ``corpus`` or ``store``.
        progress: who is told of the stages.

    Raises:
        CorpusError: the corpus or a row of it cannot be used.
        EncoderError: the model cannot be found or loaded.
        WhiteningError: the embeddings do not allow the whitening asked for.
        ArtifactError: the store is damaged and there is no corpus to mend it from.
        BusyError: another process is writing the same folder.
        OutputError: the disk is full or cannot be written.
    """
    if config.out is None:
        raise ConfigError("say where the index goes: --out DIR")
    out = Path(config.out)
    stages = Stages(progress or Silent())
    faiss_index.load_faiss()
    labels = read_labels(config)
    if config.threads is not None:
        faiss_index.set_threads(config.threads)
    with only_writer(out, what="index"):
        faiss_index.tidy(out)
        encoded = embeddings(config, labels, stages)
        settled = _settle(config, encoded, labels, stages)
        # What is left to do needs no model in memory.
        encoded = replace(encoded, work=None)
        version = faiss_index.find_version(out, settled.identity)
        up_to_date = version is not None and version == _current(out)
        if version is None:
            version = faiss_index.next_version(out, settled.identity)
            _publish(config, encoded, settled, version, stages)
        if not up_to_date:
            faiss_index.set_current(out, version)
        _, fields = faiss_index.read_fields(out, verify="manifest")
        return BuildReport(out, version, up_to_date, fields, encoded)


def _current(out: Path) -> str | None:
    """Return the published version; a damaged ``CURRENT`` counts as none and is replaced."""
    try:
        _, fields = faiss_index.read_fields(out, verify="manifest")
    except ArtifactError:
        return None
    return str(fields["version"])


def embeddings(config: BuildConfig, labels: Labels | None, stages: Stages) -> EncodeReport:
    """Return the store filled with the corpus, or as it is where no corpus is named."""
    if labels is not None:
        check_labels(config, labels)
    if not config.corpus:
        return _from_store_alone(config, stages)
    corpus = open_corpus(config, stages)
    check_early(config, corpus)
    return encode_shards(config, corpus, stages)


def check_early(config: BuildConfig, corpus: ParquetCorpus) -> None:
    """Refuse before hours of encoding what would be refused after them.

    Raises:
        ConfigError: k or the groups do not fit the embeddings' width, the factory string cannot be
            used, no index of so many rows fits the memory budget, or there is no GPU for FAISS.
    """
    faiss_index.require_device(config.index_device)
    dim = corpus.dim or resolve_encoder(config.encoder_config())[0].dim
    wanted = config.whitening_config()
    wanted.require_dim(dim)
    # How many rows pass a filter, and how many passages a document has, is not known yet.
    counted = config.passage_tokens is None and config.row_filter is None
    if config.chooses and config.k is None:
        possible_widths(config, dim, rows=corpus.rows if counted else None)
        return
    width = wanted.width(dim)
    if config.factory != faiss_index.AUTO:
        inner = faiss_index.inner_index(config.factory, width or dim)
        if config.passage_tokens is None:
            # More than the corpus has cannot be left of it; but a document has many passages.
            faiss_index.require_training_rows(inner, config.factory, rows=corpus.rows)
    if counted and width is not None and config.budget is not None:
        choose_index(config, rows=corpus.rows, dim=dim, k=width)


def check_labels(config: BuildConfig, labels: Labels) -> None:
    """Refuse before hours of encoding labels that would be refused after them.

    Raises:
        ConfigError: there is nothing to encode their texts with.
        CorpusError: they are too few, or say nothing.
    """
    labels.require_usable()
    if not config.corpus or (config.embedding_column is not None and config.model is None):
        what = (
            "the model of the embedding column with --model" if config.corpus else "the corpus too"
        )
        raise ConfigError(
            f"{labels.source} holds texts, which are to be encoded; name {what}, or leave the "
            "labels out"
        )


def _from_store_alone(config: BuildConfig, stages: Stages) -> EncodeReport:
    given = [
        option
        for option, value in (
            ("--text-column", config.text_columns),
            ("--embedding-column", config.embedding_column),
            ("--id-column", config.id_column),
            ("--keep", config.keep),
            ("--filter", config.row_filter),
            ("--limit", config.limit),
            ("--passage-tokens", config.passage_tokens),
        )
        if value
    ]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} says how to read a corpus, and none is named; name it, or "
            "leave the option out to take the store as it is"
        )
    wanted = None
    if config.model is not None:
        wanted = resolve_encoder(config.encoder_config())[0].fingerprint
    store = EmbeddingStore.open(config.store_path, fingerprint=wanted)
    record = store.corpus()
    counts = Counts(passages=record.rows if record.source.get("passages") else 0)
    with stages.stage("verify store", record.rows) as watcher:
        for part in record.parts:
            counts.read += part.read
            counts.truncated += part.truncated
            if part.rows:
                store.require(part.shard)
            watcher.advance(part.rows)
    counts.skipped.update(record.skipped)
    counts.reused = counts.read - sum(record.skipped.values())
    return EncodeReport(store, record, counts, stages)


def _settle(
    config: BuildConfig, encoded: EncodeReport, labels: Labels | None, stages: Stages
) -> _Settled:
    fitted = fit_whitening(config, encoded, labels, stages)
    whitening = fitted.whitening
    choice = choose_index(config, rows=encoded.record.rows, dim=whitening.dim, k=whitening.k)
    plan = IndexPlan(
        choice, config.seed, config.target_recall, budget=config.budget, device=config.index_device
    )
    return _Settled(fitted, plan, _identity(config, encoded, fitted, plan))


def _identity(config: BuildConfig, encoded: EncodeReport, fitted: Fitted, plan: IndexPlan) -> str:
    """Return what tells this version from one made of other inputs or choices."""
    choices = fitted.whitening.choices()
    named = [choices.pop(name) for name in ("kind", "k", "exponent", "center", "normalize_input")]
    del choices["dim"]
    if config.weight_column is not None:
        choices |= {"weight_column": config.weight_column, "weighting": config.weighting}
    if fitted.choice is not None:
        # The manifest tells how it was chosen.
        choices["chosen"] = fingerprint(fitted.choice.to_json())
    return fingerprint(
        {
            "format_version": faiss_index.FORMAT_VERSION,
            "corpus": encoded.record.fingerprint,
            "encoder": encoded.store.encoder,
            "encoder_fingerprint": encoded.store.fingerprint,
            # What most transforms lack is left out, so that versions made before it was known
            # are found again.
            "whitening": [*named, choices] if choices else named,
            "factory": _factory_identity(plan, fitted.whitening.k),
            "seed": plan.seed,
        }
    )


def _factory_identity(plan: IndexPlan, k: int) -> list[Any]:
    """Return what tells an index from one of other settings.

    What cannot show is left out, so that versions made before it was known are found again.
    """
    settings: dict[str, Any] = {}
    inner = faiss_index.inner_index(plan.built, k)
    if faiss_index.has_parameters(inner) or plan.choice.rerank is not None:
        settings["target_recall"] = plan.target_recall
    if plan.budget is not None:
        settings["memory_budget"] = plan.budget
    if faiss_index.gains_by_rotation(inner):
        settings["rotated"] = True
    named: list[Any] = [plan.choice.asked, plan.built]
    return [*named, settings] if settings else named


def _publish(
    config: BuildConfig, encoded: EncodeReport, settled: _Settled, version: str, stages: Stages
) -> None:
    """Assemble the index and write the version's folder, whole or not at all."""
    store, record, fitted = encoded.store, encoded.record, settled.fitted
    stages.watcher.note(index_note(settled.plan.choice))
    with contextlib.ExitStack() as ending:

        def fill(folder: Path) -> dict[str, Any]:
            made = assemble_index(store, record, fitted.whitening, settled.plan, stages, folder)
            with stages.stage("diagnose", record.rows) as watcher:
                shape = geometry(store, record, fitted.whitening, seed=config.seed)
                watcher.advance(record.rows)
            # It ends when the folder is published.
            ending.enter_context(stages.stage("publish", record.rows)).advance(record.rows)
            fitted.whitening.save(folder / faiss_index.WHITENING)
            fitted.moments.save(folder / faiss_index.MOMENTS)
            faiss_index.write_documents(folder / faiss_index.DOCUMENTS, _documents(encoded))
            return {
                **_facts(config, encoded, settled),
                "geometry": shape,
                "version": version,
                "factory": _factory_facts(settled.plan, made),
                "bytes": _bytes(encoded, made, folder),
                "seconds": dict(stages.seconds),
                "stage_rows": dict(stages.rows),
            }

        faiss_index.publish(Path(str(config.out)), version, fill)


def index_note(choice: faiss_index.FactoryChoice) -> str:
    """Return what is said of an index before work on it starts."""
    parts = {name: size for name, size in vars(choice.expected).items() if size}
    split = ", ".join(f"{name} {size:,}" for name, size in parts.items())
    return f"index {choice.built}: {choice.why}; {choice.expected.total:,} bytes expected ({split})"


def _factory_facts(plan: IndexPlan, made: Assembled) -> dict[str, Any]:
    choice = plan.choice
    return {
        "asked": choice.asked,
        "built": choice.built,
        "why": choice.why,
        "expected_bytes": choice.expected.to_json(),
        "expected_recall": choice.expected_recall,
        "nprobe": made.nprobe,
        "tuned": made.tuned.to_json(),
        "rerank": made.rerank,
        "memory_budget": plan.budget,
        "device": made.device,
        # As it is searched unless asked otherwise.
        "mapped": made.mapped or (plan.budget is not None and made.file_bytes > plan.budget),
        "rotated": made.rotated,
    }


def _facts(config: BuildConfig, encoded: EncodeReport, settled: _Settled) -> dict[str, Any]:
    """Return what a version's manifest says of its inputs and choices."""
    choice = settled.fitted.choice
    return {
        "kind": faiss_index.KIND,
        "format_version": faiss_index.FORMAT_VERSION,
        "identity": settled.identity,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": config.to_json(),
        "store": str(config.store_path.resolve()),
        "corpus": {
            "fingerprint": encoded.record.fingerprint,
            "source": dict(encoded.record.source),
        },
        "encoder": encoded.store.encoder,
        "encoder_fingerprint": encoded.store.fingerprint,
        "agreement": encoded.agreement,
        "compiled": encoded.compiled,
        "whitening": settled.fitted.whitening.describe(),
        "choice": None if choice is None else choice.to_json(),
        "rows": encoded.record.rows,
        "counts": encoded.counts.to_json(),
        "made_by": _made_by(),
    }


def _bytes(encoded: EncodeReport, made: Assembled, folder: Path) -> dict[str, Any]:
    """Return bytes of the raw and of the reduced vectors, and of the files beside them."""
    return {
        "raw": raw_bytes(encoded.store, encoded.record),
        "vectors": made.vector_bytes,
        "index_file": made.file_bytes,
        "documents_file": (folder / faiss_index.DOCUMENTS).stat().st_size,
        "index": made.sizes.to_json(),
    }


def _made_by() -> dict[str, Any]:
    return {
        "whiten_index": whiten_index.__version__,
        "faiss": faiss_index.describe_faiss(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _documents(encoded: EncodeReport) -> Iterator[pa.Table]:
    return (encoded.store.documents(part) for part in encoded.record.parts if part.rows)
