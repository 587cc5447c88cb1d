"""The build: encode, fit the whitening, fill a FAISS index, publish a version."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.lock import only_writer
from whiten_index.errors import ConfigError, GateError
from whiten_index.index.library import set_threads
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.encode import encode_or_open
from whiten_index.pipeline.executor_session import executor_session, with_absolute_paths
from whiten_index.pipeline.fit import fit_whitening
from whiten_index.pipeline.labels import read_labels
from whiten_index.pipeline.publish import (
    BuildReport,
    VersionSpec,
    register,
    version_folder,
    version_identity,
    write_files,
)
from whiten_index.progress import Progress, Stages
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.versions.published import (
    CURRENT,
    find_version,
    next_version,
    published_fields,
    read_published,
    require_own_current,
    set_current,
    tidy,
)

_MAX_SHRINK, _LEAST_GUARDED = 0.2, 100  # a smaller index is soon built again


def build_index(
    config: BuildConfig,
    *,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
    registered: bool = True,
    bridged: EmbeddingStore | None = None,
) -> BuildReport:
    """Build and publish an index; finished steps of an earlier run are not repeated.

    Args:
        config: options of the build, which must name ``out``, and ``corpus`` or ``store``.
        progress: a watcher with the methods of ``whiten_index.progress.Progress``;
            ``whiten_index.cli.terminal.Bars()`` shows a bar on a terminal and in a notebook.
        facts: further fields of the version's manifest.
        registered: whether ``gc`` of the store asks for the index, as not for one removed at once.
        bridged: the bridged rows of a migration, of which the index is made.

    Returns:
        Version, counts, choice of the transform and bytes; ``to_json()`` has all of them.

    Raises:
        WhiteningError: the embeddings do not allow the transform.
        ArtifactError: the store is damaged and there is no corpus to mend it from.
        WhitenIndexError: others; see ``encode_corpus``.

    Examples:
        >>> config = BuildConfig(corpus="docs.parquet", text_columns="text", k=16, out="new")
        >>> build_index(config).to_json()["rows"]
        60
    """
    config = with_absolute_paths(config)
    if config.out is None:
        raise ConfigError("say where the index goes: --out DIR")
    out, mirror = place_of(config.out_place)
    stages = Stages(progress or Progress())
    labels = read_labels(config)
    set_threads(config.threads)
    with only_writer(out, what="index"):
        before = mirror.latest(out / CURRENT)
        require_own_current(out, mirror)
        tidy(out)
        with executor_session(config, stages) as executor:
            encoded = encode_or_open(config, stages, executor, bridged=bridged)
            config = config.settled(encoded.store.encoder)
            rows = encoded.record.rows
            if registered:
                register(encoded, config.out_place)
            # A damaged ``CURRENT`` counts as none and is replaced.
            published = published_fields(out, mirror)
            _require_rows(config, rows, had=published.get("rows", 0))
            had = published.get("config", {}).get("keep") or ()
            if config.corpus and (gone := sorted({*had} - {*config.keep})):
                stages.watcher.note(
                    f"note: the version before keeps {', '.join(gone)}, and this build does not; "
                    "name each with --keep"
                )
            fitted = fit_whitening(config, encoded, labels)
            plan = config.index_plan(rows=rows, dim=fitted.whitening.dim, k=fitted.whitening.k)
            spec = VersionSpec(fitted, plan, version_identity(encoded, fitted, plan))
            encoded.note_spent()
            # What follows needs no model in memory.
            encoded = replace(encoded, work=None)
            version = find_version(out, spec.identity, mirror)
            up_to_date = version is not None and version == published.get("version")
            made = version is None
            if version is None:
                version = next_version(out, spec.identity, mirror)
                with version_folder(out, version, mirror, rows, stages) as (folder, fields):
                    fields |= write_files(folder, config, encoded, spec, version)
                    fields |= facts or {}
            if not up_to_date:
                set_current(out, version, mirror=mirror, tag=before, made=made)
            manifest = read_published(config.out_place).fields
            return BuildReport(config.out_place, version, up_to_date, manifest, encoded)


def _require_rows(config: BuildConfig, rows: int, *, had: int) -> None:
    """Refuse to replace many rows by few, as a trial with ``--limit`` would."""
    if not config.force and had >= _LEAST_GUARDED and rows < had * (1 - _MAX_SHRINK):
        raise GateError(
            f"{config.out} has {had:,} rows, and this build would publish {rows:,} in their place; "
            "name another --out, or add --force. What was encoded is kept"
        )
