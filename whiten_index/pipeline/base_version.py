"""The published version that an update starts from, and the build that it came of."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.distributed.executors import Executor
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, GateError, WhiteningError
from whiten_index.evaluation.judgements import read_judged
from whiten_index.options import flag_of
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.build_options import RunnerOptions
from whiten_index.pipeline.early_checks import check_early
from whiten_index.pipeline.encode import EncodeReport, encode_shards, open_corpus
from whiten_index.pipeline.executor_session import with_absolute_paths
from whiten_index.pipeline.fit import Fitted
from whiten_index.pipeline.query_files import CanaryFile
from whiten_index.pipeline.update_config import OTHER_JUDGEMENTS, UpdateConfig
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.published import (
    MOMENTS,
    VERSIONS,
    WHITENING,
    Version,
    current_or_none,
    model_of,
    read_version,
    with_published,
)
from whiten_index.versions.references import corpus_record, open_store
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import Choice
from whiten_index.whitening.transform import Whitening


@dataclass(frozen=True, eq=False)
class BaseVersion:
    """The published version that an update starts from."""

    source: Version  # the version and its files
    store: EmbeddingStore  # the embeddings it was built from
    record: CorpusRecord  # its corpus in the store
    fitted: Fitted  # its transform, and the moments that this was fitted on
    config: BuildConfig  # the build that would make it again, of the corpus as it is now

    @classmethod
    def open(cls, config: UpdateConfig, *, version: str | None = None) -> "BaseVersion":
        """Open the published version of an index, or another one, every checksum verified."""
        root, mirror = place_of(config.index)
        if version is None:
            source = with_published(root, Version.check, mirror)
        else:
            mirror.fetch(root / VERSIONS / version)
            source = read_version(root / VERSIONS / version, mirror=mirror).check()
        fields = source.fields
        remedy = "name it with --store DIR, or build the index again"
        store = open_store(source, given=config.store, reader="an update", remedy=remedy)
        record = corpus_record(source)
        if config.store is not None and (
            lacking := sum(map(store.missing_rows, record.distinct_parts))
        ):
            raise ArtifactError(
                f"the store {store.root}, named with --store, lacks {lacking:,} of the "
                f"{record.rows:,} rows that version {source.name} was made of; name the "
                "store that the index was built from, or leave --store out; if it is that one, "
                "whiten-index build mends it"
            )
        choice = None if (chosen := fields.get("choice")) is None else Choice.from_json(chosen)
        whitening = Whitening.load(source.file(WHITENING))
        moments = Moments.load(source.file(MOMENTS), dim=whitening.dim)
        fitted = Fitted(moments, whitening, choice)
        return cls(source, store, record, fitted, _build_config(config, fields, store))

    @property
    def fields(self) -> Mapping[str, Any]:
        """The version's manifest."""
        return self.source.fields

    @property
    def bridged(self) -> EmbeddingStore | None:
        """The store, if it has bridged rows of a migration."""
        return self.store if "bridge" in self.fields else None

    @property
    def passages(self) -> bool:
        """True if rows are passages of documents."""
        return bool(self.fields["corpus"]["source"].get("passages"))

    @property
    def update(self) -> Mapping[str, Any]:
        """Facts of the update that made it, empty if a build did."""
        found: Mapping[str, Any] = self.fields.get("update") or {}
        return found

    def read_before(self, corpus: ParquetCorpus) -> CorpusRecord:
        """Return the record by which unchanged files are recognised.

        The store's own record may know later times of files with the same rows.
        """
        try:
            latest = self.store.corpus(corpus.config.source_identity())
        except ArtifactError:
            return self.record
        return latest if latest.fingerprint == self.record.fingerprint else self.record

    def encode(
        self, corpus: ParquetCorpus, stages: Stages, executor: Executor, *, read_all: bool = False
    ) -> EncodeReport:
        """Encode what its store lacks of the corpus as it is now; the record is not saved."""
        return encode_shards(
            self.config, corpus, stages, executor=executor, before=self.read_before(corpus),
            read_all=read_all, remember=False, bridged=self.bridged,
        )  # fmt: skip


def _build_config(
    config: UpdateConfig, fields: Mapping[str, Any], store: EmbeddingStore
) -> BuildConfig:
    known = BuildConfig.__dataclass_fields__
    given = {name: value for name, value in fields["config"].items() if name in known}
    if not given["corpus"]:
        raise ArtifactError(
            f"version {fields['version']} was built from a store alone, which does not tell how "
            "its corpus is read (ids, kept columns); run whiten-index build with the corpus once, "
            "and update from then on"
        )
    given |= {
        "corpus": config.corpus or tuple(fields["corpus"]["source"]["sources"]),
        "out": config.index,
        "store": str(store.place),
        "device": config.device,
        "backend": config.backend,
        "threads": config.threads,
        "index_device": config.index_device,
    }
    given |= {name: getattr(config, name) for name in RunnerOptions.__dataclass_fields__}
    build, trust = with_absolute_paths(BuildConfig(**given)), config.trust_remote_code
    money = {name: getattr(config, name) for name in ("price", "max_cost")}
    recorded = recorded_spec(fields["encoder"])
    if recorded is None:
        return replace(
            build, model=config.model, base_url=config.base_url, revision=None,
            trust_remote_code=trust, **money,
        )  # fmt: skip
    opening = {name: getattr(config, name) for name in ("model", "base_url")}
    found = QueryEncoder(recorded, trust_remote_code=trust, **opening).resolve()[2]
    # The encoder record alone says which model, and the update's own options what it may do.
    taken = ("model", "revision", "trust_remote_code", "local_files_only", "code_revision",
             "base_url")  # fmt: skip
    return replace(build, **money, **{name: getattr(found, name) for name in taken})


_OPTION = re.compile(r"--[a-z][a-z-]*")


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Add advice for an update to errors that name an option of the build."""
    own = {flag_of(name) for name in UpdateConfig.__dataclass_fields__}
    try:
        yield
    except (ConfigError, CorpusError, WhiteningError) as error:
        if set(_OPTION.findall(str(error))) <= own:
            raise
        raise type(error)(
            f"{error} (an update keeps the options that the index was built with: mend the corpus, "
            "keep the transform with --refit never, or run whiten-index build again)"
        ) from error


def open_base(
    config: UpdateConfig, stages: Stages
) -> tuple[BaseVersion, ParquetCorpus, CanaryFile | None]:
    """Open the published version, the corpus and the canary file, and check that they fit."""
    with stages.stage("open", 0):
        base = BaseVersion.open(config)
    if config.certify_gate is not None:
        known = required_certificate(base)
        asked = known["inputs"]
        if asked["queries"] is not None:
            judged = read_judged(asked["queries"], asked["qrels"], split=asked["qrels_split"])
            if judged.digest != known["judgements"]:
                raise GateError(f"gate certificate: {OTHER_JUDGEMENTS}")
            require_model(base.config)
    canaries = None
    if config.canary_file is not None:
        canaries = CanaryFile.read(config.canary_file, dim=base.fitted.whitening.dim)
        if canaries.texts is not None and base.config.model is None:
            raise ConfigError(
                f"{config.canary_file} holds texts, and the index was built from an embedding "
                "column, so that nothing is known to encode them with; give their embeddings"
            )
    corpus = open_corpus(base.config, stages, dim=base.store.dim)
    check_early(base.config, corpus)
    return base, corpus, canaries


def required_certificate(base: BaseVersion) -> dict[str, Any]:
    """Return the certificate of a version."""
    known: dict[str, Any] | None = base.fields.get("certificate")
    if known is None:
        raise ArtifactError(
            f"version {base.source.name} of {base.config.out} has no certificate; write one with "
            "whiten-index certify"
        )
    return known


def require_model(build: BuildConfig) -> None:
    """Refuse queries that nothing is known to encode with."""
    if build.embedding_column is not None and build.model is None:
        raise ConfigError(
            "the index was built from an embedding column, so that nothing is known to encode the "
            "queries of its certificate with; name the model of the column with --model"
        )


def nothing_to_do(config: UpdateConfig, base: BaseVersion, record: CorpusRecord) -> bool:
    """Return whether an update of this corpus would publish the same version again."""
    if record.fingerprint != base.fields["corpus"]["fingerprint"] or config.choose_again:
        return False
    decided = base.update.get("decision") or {}
    if decided.get("whitening") != "keep" or config.order == "never":
        # A transform that was fitted on this very corpus comes out the same.
        return True
    return config.order == "auto" and decided.get("threshold") == config.drift_threshold


def require_not_withdrawn(
    config: UpdateConfig, base: BaseVersion, record: CorpusRecord, *, identity: str | None = None
) -> None:
    """Refuse to publish a corpus that was rolled back, unless another transform is made of it."""
    source = base.source
    current = current_or_none(source.root)
    withdrawn = {} if current is None else current.withdrawn
    for name, facts in withdrawn.items():
        same = config.order == "auto" or identity == facts.get("identity")
        # Of another model, as in a migration that was given up, the model may be at fault.
        same &= facts.get("encoder") == model_of(base.fields)
        if facts.get("corpus") == record.fingerprint and same:
            there = source.mirror.holds(source.root / VERSIONS / name)
            back = f"; or take that version back: whiten-index rollback {config.index} --to {name}"
            raise GateError(
                f"the corpus still is that of version {name}, which was rolled back, so nothing is "
                "published; mend the corpus; or, where the transform was at fault, order another "
                f"with --refit always or never{back if there else ''}"
            )
