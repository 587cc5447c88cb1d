"""The update: encode what changed, keep the transform or fit it again, publish a version."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from whiten_index.artifacts.atomic import remove_folder
from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.artifacts.object_store import Tag
from whiten_index.errors import ConfigError, require_config
from whiten_index.index.choice import IndexPlan, OperatingPoint
from whiten_index.index.codes import why_not_reusable
from whiten_index.index.exact import Rows
from whiten_index.index.faiss_build import CodeReuse
from whiten_index.index.library import set_threads
from whiten_index.pipeline.base_version import (
    BaseVersion,
    advising,
    nothing_to_do,
    open_base,
    require_not_withdrawn,
    required_certificate,
)
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.certificate import certificate
from whiten_index.pipeline.changes import (
    Changes,
    StoredRows,
    apart,
    compare,
    count_documents,
    part_digests,
)
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.executor_session import executor_session
from whiten_index.pipeline.fit import fit_moments, fit_whitening
from whiten_index.pipeline.gates import certificate_gate, require_passed, run_gates
from whiten_index.pipeline.labels import read_labels
from whiten_index.pipeline.publish import (
    BuildReport,
    VersionSpec,
    register,
    version_folder,
    version_identity,
    write_files,
)
from whiten_index.pipeline.query_files import CanaryFile
from whiten_index.pipeline.update_config import GateConfig, UpdateConfig
from whiten_index.progress import Progress, Stages
from whiten_index.store.digest_index import DigestIndex
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.store.sampling import row_starts
from whiten_index.versions.bundle import open_unsealed, read_index
from whiten_index.versions.published import (
    CANDIDATES,
    CHANGES,
    CURRENT,
    VERSIONS,
    WHITENING,
    find_version,
    next_version,
    pass_over,
    read_current,
    read_published,
    read_version,
    set_current,
    tidy,
    version_names,
    version_number,
)
from whiten_index.whitening.drift import Drift, decide
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import WidthSpec


@dataclass(frozen=True, repr=False)
class UpdateReport(BuildReport):
    """Result of an update; ``up_to_date`` if nothing was published, since nothing had changed."""

    base: str  # the version that was published before
    changes: Changes  # changes of the documents

    @property
    def update(self) -> Mapping[str, Any]:
        """Decision, drift and base; empty if nothing was done, or an equal build was first."""
        return {} if self.up_to_date else dict(self.manifest.get("update", {}))

    @property
    def gates(self) -> list[Mapping[str, Any]]:
        """Findings of the gates; empty where ``update`` is."""
        return [] if self.up_to_date else list(self.manifest.get("gates", []))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        kept, files = self.encoded.counts.kept_files, len(self.encoded.record.files)
        return {
            **super().to_json(),
            "base": self.base,
            "rows": self.changes.to_json(),
            "files": {"read": files - kept, "skipped": kept},
            "drift": self.update.get("drift"),
            "decision": self.update.get("decision"),
            "gates": self.gates,
        }


def update_index(config: UpdateConfig, *, progress: Progress | None = None) -> UpdateReport:
    """Bring a published index up to date with its corpus; known texts are not encoded again.

    Args:
        config: the index, and what to do otherwise than its build did.
        progress: see ``build_index``.

    Returns:
        Version, changes of the rows, drift and gates; ``up_to_date`` if nothing was published.

    Raises:
        EncoderError: the model is gone, or is another one by now.
        ArtifactError: nothing is published, or it or its store is damaged.
        GateError: the new version is not published, and kept aside.
        WhitenIndexError: others; see ``encode_corpus``.

    Examples:
        >>> update_index(UpdateConfig(index="index")).up_to_date
        True
    """
    require_config(config, UpdateConfig)
    stages = Stages(progress or Progress())
    out, mirror = place_of(config.index)
    set_threads(config.threads)
    # Nothing is made where there is no index.
    read_current(out, mirror)
    with advising(), only_writer(out, what="index"), ExitStack() as machines:
        before = mirror.latest(out / CURRENT)
        tidy(out)
        base, corpus, canaries = open_base(config, stages)
        executor = machines.enter_context(executor_session(base.config, stages))
        encoded = base.encode(corpus, stages, executor, read_all=config.read_all)
        register(encoded, base.config.out_place)
        changes = _compare(base, encoded)
        version = base.source.name
        if not nothing_to_do(config, base, encoded.record):
            require_not_withdrawn(config, base, encoded.record)
            spec, facts = decide_update(config, base, encoded)
            same_corpus = encoded.record.fingerprint == base.fields["corpus"]["fingerprint"]
            if spec.reuse is None or not same_corpus:
                require_not_withdrawn(config, base, encoded.record, identity=spec.identity)
                asked = {name: getattr(config, name) for name in GateConfig.__dataclass_fields__}
                gates = {"gates_asked": fingerprint(asked)}
                facts = {"base": base.source.name, "rows": changes.to_json(), **gates, **facts}
                version = _publish(config, base, encoded, spec, changes, facts, canaries, before)
        # Only now: a corpus in another folder each night, or refused, would keep its shards.
        encoded.store.save_corpus(encoded.record, index=base.config.out_place)
        if dict(base.record.source) != dict(encoded.record.source):
            encoded.store.forget_corpus(base.record.source, index=base.config.out_place)
        encoded.note_spent()
        out_place, old = base.config.out_place, base.source.name
        fields = read_published(out_place).fields
        return UpdateReport(out_place, version, version == old, fields, encoded, old, changes)


def _compare(base: BaseVersion, encoded: EncodeReport) -> Changes:
    """Return the changes of the documents; only parts that differ are read."""
    gone, came, same = apart(base.record, encoded.record)
    rows = sum(part.rows for part in came)
    with encoded.stages.whole("compare", rows):
        return compare(
            StoredRows(base.store, gone),
            StoredRows(encoded.store, came),
            same=count_documents(encoded.store, same, passages=base.passages),
        )


def _publish(
    config: UpdateConfig,
    base: BaseVersion,
    encoded: EncodeReport,
    spec: VersionSpec,
    changes: Changes,
    facts: dict[str, Any],
    canaries: CanaryFile | None,
    tag: Tag | None,
) -> str:
    """Make a version and publish it if its gates are passed; return its name."""
    # The same update may have made it and died before naming it. One of the same corpus that was
    # published earlier does not count: its gates and changes are those of another update.
    out, mirror, record = base.source.root, base.source.mirror, encoded.record
    version = find_version(out, spec.identity, mirror)
    if version is not None:
        made = read_version(out / VERSIONS / version).fields
        before: Mapping[str, Any] = made.get("update", {})
        same = all(before.get(name) == facts[name] for name in ("base", "gates_asked"))
        # A file of canaries may be another one by now.
        if same and config.canary_file is None:
            set_current(out, version, mirror=mirror, tag=tag)
            return version
        if version_number(version) > version_number(base.source.name):
            # A rollback would take it for one that passed its gates.
            tag = pass_over(out, read_current(out), version, mirror, tag)
    version = next_version(out, spec.identity, mirror)
    for name in version_names(out, inside=CANDIDATES):
        remove_folder(out / CANDIDATES / name)
    new = version_folder(out, version, mirror, record.rows, encoded.stages)
    with new as (folder, fields):
        fields |= write_files(folder, base.config, encoded, spec, version)
        if spec.reuse is not None and fields["factory"]["built"] != spec.plan.built:
            # The index that was to be kept has become too slow.
            facts["decision"] |= {"index": "train", "index_why": fields["factory"]["why"]}
            facts["trained"] = None
        kept = facts["decision"]["whitening"]
        changes.save(folder / CHANGES, base=base.source.name, whitening=kept)
        expected, counts = None, facts["rows"]
        if not base.passages:
            # Changes count documents, and the index has their passages.
            expected = base.record.rows - counts["deleted"] + counts["new"]
        if canaries is not None and canaries.texts is not None:
            encoder = encoded.encoder(base.config)()
            canaries = replace(canaries, embeddings=encoder.encode_queries(canaries.texts))
        gates = run_gates(
            open_unsealed(folder, fields),
            encoded,
            config=config,
            base_rows=base.record.rows,
            expected_rows=expected,
            canaries=canaries,
            seed=base.config.seed,
        )
        if config.certify_gate is not None:
            known = required_certificate(base)
            asked = encoded, base.config, known["inputs"]
            certified = certificate(open_unsealed(folder, fields), *asked)
            gates = (*gates, certificate_gate(certified, config.certify_gate, known))
            fields["certificate"] = certified
        elif base.fields.get("certificate"):
            encoded.stages.watcher.note(
                f"note: version {base.source.name} has a certificate, and this one has none; write "
                "one with whiten-index certify, or give --certify-gate to each update"
            )
        carried = base.fields.keys() & {"bridge", "bridged_from"}
        fields |= {name: base.fields[name] for name in carried}
        fields |= {"update": facts, "gates": [gate.to_json() for gate in gates]}
    require_passed(gates, candidate=out / CANDIDATES / version)
    set_current(out, version, mirror=mirror, tag=tag, made=True)
    return version


# Lists trained for so many times fewer or more rows are still good ones.
_LISTS_RATIO = 2.0
_LISTS = re.compile(r"IVF(\d+)")


def decide_update(
    config: UpdateConfig, base: BaseVersion, encoded: EncodeReport
) -> tuple[VersionSpec, dict[str, Any]]:
    """Measure the drift, and decide which parts of the published version the new one keeps.

    The new version keeps the index if it reuses codes. Decision and drift are for its manifest.
    """
    old_rows = _carried_rows(encoded.store, base.record, encoded.record)
    # Rows that are as they were when the transform was fitted, at least.
    gone = base.record.rows - len(np.unique(old_rows[old_rows >= 0]))
    shared = max(float(base.update.get("shared", base.record.rows)) - gone, 0.0)
    named = _named_config(base.config, base.fitted.whitening)
    today = fit_moments(named, encoded)
    with encoded.stages.whole("measure drift", encoded.record.rows):
        both = min(shared, base.fitted.moments.count, today.count)
        drift = Drift.measure(base.fitted.whitening, base.fitted.moments, today, shared=both)
    decision = decide(drift, threshold=config.drift_threshold, order=config.order)
    said, facts = asdict(decision), {"drift": drift.to_json(), "shared": shared}
    if decision.whitening == "refit":
        again = base.config if config.choose_again else named
        fitted = fit_whitening(again, encoded, read_labels(again))
        if base.fitted.choice is not None and fitted.choice is None:
            fitted = replace(fitted, choice=base.fitted.choice)
        plan = _plan(again, encoded, fitted.whitening)
        spec = VersionSpec(fitted, plan, version_identity(encoded, fitted, plan))
        facts |= {"shared": float(encoded.record.rows)}
        return spec, {**facts, "decision": {**said, "index": "train", "index_why": ""}}
    spec, why = _kept(base, encoded, old_rows)
    index, trained = ("train", None) if spec.reuse is None else ("keep", _trained(base))
    decided = {**said, "index": index, "index_why": why}
    return spec, {**facts, "decision": decided, "trained": trained}


def _named_config(config: BuildConfig, whitening: Whitening) -> BuildConfig:
    """Return the build that fits what was chosen, without choosing again."""
    if not config.chooses:
        wish = WidthSpec.parse(config.k)
        # Without a number or a share, k is the rank, which may change.
        stays = wish.number is not None or wish.variance is not None
        return replace(config, k=whitening.k) if stays else config
    return replace(
        config,
        whiten=whitening.kind.value,
        k=whitening.k,
        exponent=whitening.exponent,
        center=whitening.center,
        queries=None,
        qrels=None,
        qrels_split=None,
        choose_sample=BuildConfig.choose_sample,
    )


def _carried_rows(store: EmbeddingStore, before: CorpusRecord, now: CorpusRecord) -> Rows:
    """Return for each row (n,) the row with the same text of the record before, −1 if it is new."""
    # A part that is in both states has its rows in their order.
    places: dict[tuple[str, str], list[tuple[int, CorpusPart]]] = {}
    for start, part in zip(row_starts(before).tolist(), before.parts, strict=False):
        places.setdefault((part.digests, part.documents), []).append((start, part))
    same = [places.get((part.digests, part.documents)) for part in now.parts]
    kept = [left.pop(0)[0] if left else -1 for left in same]
    gone = sorted((each for left in places.values() for each in left), key=lambda each: each[0])
    gone = [(start, part) for start, part in gone if part.rows]
    known = DigestIndex(part_digests(store, [part for _, part in gone]))
    begins = np.array([start for start, _ in gone], dtype=np.int64)
    found = list[Rows]()
    for start, part in zip(kept, now.parts, strict=True):
        if start >= 0:
            found.append(np.arange(start, start + part.rows, dtype=np.int64))
        elif part.rows:
            at = known.find(store.digests(part))
            rows = np.full(part.rows, -1, dtype=np.int64)
            rows[at.known] = begins[at.segment[at.known]] + at.row[at.known]
            found.append(rows)
    return np.concatenate(found)


def _kept(base: BaseVersion, encoded: EncodeReport, old_rows: Rows) -> tuple[VersionSpec, str]:
    """Return the version with the same transform, and why its index is not kept, if so."""
    fitted, factory = base.fitted, base.fields["factory"]
    kept = {"whitening": base.fields["files"][WHITENING]["sha256"]}
    reuse, read = None, partial(read_index, base.source, mapped=True)
    plan = _similar_plan(base, encoded)
    if plan.built != factory["built"]:
        why = "another index suits so many rows"
    elif read().ntotal != base.record.rows:
        why = "it has other rows than its corpus"
    elif not (why := why_not_reusable(read()) or ""):
        reuse = CodeReuse(read, old_rows, OperatingPoint(**factory["tuned"]), factory["rerank"])
        kept["index"] = _trained(base)
    identity = version_identity(encoded, fitted, plan, kept=kept)
    return VersionSpec(fitted, plan, identity, reuse, kept=base.source), why


def _trained(base: BaseVersion) -> str:
    """Return the identity of the version whose index was trained last."""
    return str(base.update.get("trained") or base.source.sha256)


def _plan(config: BuildConfig, encoded: EncodeReport, whitening: Whitening) -> IndexPlan:
    return config.index_plan(rows=encoded.record.rows, dim=whitening.dim, k=whitening.k)


def _similar_plan(base: BaseVersion, encoded: EncodeReport) -> IndexPlan:
    """Return the plan of an index for today's rows, with the base's number of lists if it fits."""
    built, whitening = str(base.fields["factory"]["built"]), base.fitted.whitening
    wanted, kind = _plan(base.config, encoded, whitening), _LISTS.sub("", built)
    # Kinds that --max-latency ruled out are not tried again.
    plans = (wanted, *wanted.faster)
    place = next((n for n, plan in enumerate(plans) if _LISTS.sub("", plan.built) == kind), 0)
    wanted = replace(plans[place], faster=plans[place + 1 :])
    ours, theirs = _LISTS.search(built), _LISTS.search(wanted.built)
    if ours is None or theirs is None or kind != _LISTS.sub("", wanted.built):
        return wanted
    if not 1 / _LISTS_RATIO <= int(ours[1]) / int(theirs[1]) <= _LISTS_RATIO:
        return wanted
    try:
        same = _plan(replace(base.config, factory=built), encoded, whitening)
    except ConfigError:
        # It no longer fits the budget.
        return wanted
    kept = f"the lists of version {base.source.name} are kept"
    why = wanted.why if built == wanted.built else kept
    return replace(wanted, built=built, why=why, expected=same.expected)
