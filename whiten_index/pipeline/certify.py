"""Certify a published version, or check it against its certificate."""

import os
import shutil
from pathlib import Path
from typing import Any

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.lock import only_writer
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, GateError, require_config
from whiten_index.index.library import load_faiss, set_threads
from whiten_index.pipeline.base_version import (
    BaseVersion,
    open_base,
    require_model,
    required_certificate,
)
from whiten_index.pipeline.certificate import METRIC, certificate
from whiten_index.pipeline.changes import StoredRows, compare, count_documents
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.executor_session import executor_session
from whiten_index.pipeline.gates import certificate_gate
from whiten_index.pipeline.shard_encoding import Counts
from whiten_index.pipeline.update_config import (
    OTHER_JUDGEMENTS,
    CertifyConfig,
    PublishedOptions,
    UpdateConfig,
)
from whiten_index.progress import Progress, Stages
from whiten_index.versions.bundle import open_files
from whiten_index.versions.published import CHANGES, CURRENT, new_version, next_version, set_current

# Points that rounding may move: two near documents change places on another processor.
_TOLERANCE = 0.5


def certify_index(config: CertifyConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Certify the published version of an index, and publish it again with its certificate.

    The new version has the files of the old one; into a bucket they are uploaded again. Without
    judged queries, windows of 8 to 20 words of documents ask for their document.

    Returns:
        JSON values: ``out``, ``version`` and ``certificate``.

    Raises:
        GateError: a stratum may lose more than ``config.gate``; nothing is published.
        CorpusError: fewer than 30 questions have an answer, or the corpus changed.
        WhitenIndexError: others; see ``update_index``.

    Examples:
        >>> config = CertifyConfig(index="index", queries="queries.jsonl", qrels="qrels.tsv")
        >>> certify_index(config)["certificate"]["questions"]
        40
    """
    require_config(config, CertifyConfig)
    stages = Stages(progress or Progress())
    out, mirror = place_of(config.index)
    set_threads(config.threads)
    with only_writer(out, what="index"):
        tag = mirror.latest(out / CURRENT)
        base, encoded = _opened(config, stages)
        made = certificate(open_files(base.source), encoded, base.config, config.inputs())
        if config.gate is not None and (gate := certificate_gate(made, config.gate)).faults:
            raise GateError(f"the index is not certified: {gate.why}", gates=[gate.to_json()])
        version = next_version(out, base.fields["identity"], mirror)
        with new_version(out, version, mirror) as (folder, fields):
            kept = base.source.fields["files"].keys() - {CHANGES}
            for name in kept:
                _link(base.source.file(name), folder / name)
            base.source.check_read(*kept)
            fields |= {**base.fields, "version": version, "certificate": made}
            none = StoredRows(base.store, [])
            documents = count_documents(base.store, base.record.parts, passages=base.passages)
            compare(none, none, same=documents).save(
                folder / CHANGES, base=base.source.name, whitening="keep"
            )
        set_current(out, version, mirror=mirror, tag=tag, made=True)
    return {"out": config.index, "version": version, "certificate": made}


def recertify(config: CertifyConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Certify a published version again, write nothing, and compare with its certificate.

    Queries and judgements are those of ``config``, since a manifest from elsewhere may name any
    file. Without them the certificate must be one by pieces, which are taken from the store.

    Raises:
        ConfigError: queries are missing, or not wanted.
        ArtifactError: it has no certificate, or other figures come out.
    """
    stages = Stages(progress or Progress())
    load_faiss()
    base = BaseVersion.open(_update_config(config))
    known = required_certificate(base)
    if (config.queries is None) != (known["inputs"]["queries"] is None):
        what = "by judged queries: name them" if config.queries is None else "by pieces: leave"
        raise ConfigError(
            f"the certificate of {config.index} is {what} with --queries and --qrels"
            + " out" * (config.queries is not None)
        )
    asked = {"qrels_split": known["inputs"]["qrels_split"], "by": known["inputs"]["by"]}
    if config.queries is not None:
        require_model(base.config)
    encoded = EncodeReport(base.store, base.record, Counts(), stages)
    given = {**config.inputs(), **asked}
    made = certificate(open_files(base.source), encoded, base.config, given)
    if made["judgements"] != known["judgements"]:
        raise ConfigError(OTHER_JUDGEMENTS)
    if not _same(known, {**made, "inputs": known["inputs"]}):
        raise ArtifactError(
            f"version {base.source.name} of {config.index} does not keep its certificate: it says "
            f"{known['at_most']:.2f} points of {METRIC} at most, and {made['at_most']:.2f} come "
            "out now; if the judgements are the same, certify it again"
        )
    return made


def _same(known: Any, made: Any, most: float = 0.0) -> bool:
    """Return whether two certificates have the same figures, but for one question's ranks."""
    if isinstance(known, float) and isinstance(made, float):
        return abs(known - made) <= most
    if isinstance(known, dict) and isinstance(made, dict):
        most = max(_TOLERANCE, 100 / max(int(made.get("questions", 1)), 1))
        return known.keys() == made.keys() and all(_same(known[n], made[n], most) for n in known)
    if isinstance(known, list | tuple) and isinstance(made, list | tuple):
        return len(known) == len(made) and all(
            _same(one, other, most) for one, other in zip(known, made, strict=True)
        )
    return bool(known == made)


def _link(source: Path, target: Path) -> None:
    """Let a file have a second name, or a copy where the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _update_config(config: CertifyConfig) -> UpdateConfig:
    shared = PublishedOptions.__dataclass_fields__
    return UpdateConfig(**{name: getattr(config, name) for name in shared})


def _opened(config: CertifyConfig, stages: Stages) -> tuple[BaseVersion, EncodeReport]:
    """Return the published version and its corpus, whose texts are only read for pieces."""
    given = _update_config(config)
    if config.queries is not None:
        base = BaseVersion.open(given)
        require_model(base.config)
        return base, EncodeReport(base.store, base.record, Counts(), stages)
    base, corpus, _ = open_base(given, stages)
    with executor_session(base.config, stages) as executor:
        encoded = base.encode(corpus, stages, executor)
    if encoded.record.fingerprint != base.record.fingerprint:
        raise CorpusError(
            f"the corpus changed after {config.index} was built from it; run whiten-index update "
            "first, or give judged queries with --queries and --qrels"
        )
    return base, encoded
