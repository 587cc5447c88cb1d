"""Schema of the manifest of a version of an index."""

import datetime
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, StringConstraints, with_config
from typing_extensions import TypedDict

from whiten_index.artifacts.manifest import (
    Count,
    Described,
    Digest,
    EncoderName,
    Flag,
    Integer,
    Number,
    Positive,
    Schema,
    Sealed,
    Sha256,
    json_of,
)
from whiten_index.encoding.spec import EncoderFacts
from whiten_index.index.choice import OperatingPoint
from whiten_index.store.records import CorpusSource
from whiten_index.whitening.selection import Choice


class IndexId(Sealed):
    """Fields of ``index.json``."""

    id: Digest


INDEX_ID_SCHEMA = Schema("index_id", 1, IndexId)
VersionName = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$")]


def _time(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("Input should be a time with its zone")
    return text


class _Corpus(TypedDict):
    fingerprint: Digest
    source: CorpusSource


@with_config({"extra": "allow"})
class _Options(TypedDict):
    """Options of the build; ``BuildConfig`` checks the others when it reads them."""

    corpus: list[str]
    text_columns: list[str]
    keep: list[str]
    layers: list[Integer] | None
    out: str
    store: str | None


# Figures that are shown as they are.
_Figures = dict[str, Number | None]


@with_config({"extra": "allow"})
class _Counts(TypedDict):
    skipped: dict[str, Count]


@with_config({"extra": "allow"})
class _Whitening(TypedDict):
    kind: str
    dim: Positive
    k: Positive
    exponent: Number
    center: Flag
    similarity: Literal["cosine", "dot"]
    remove_top: NotRequired[Count]
    rank: Count
    variance_kept: Number
    rows: Number


@with_config({"extra": "allow"})
class _Factory(TypedDict):
    built: str
    tuned: Annotated[dict[str, Any], AfterValidator(json_of(OperatingPoint))]
    rerank: Count | None


@with_config({"extra": "allow"})
class _Bytes(TypedDict):
    raw: Count
    index: dict[str, Count]


@with_config({"extra": "allow"})
class _Decision(TypedDict):
    whitening: Literal["keep", "refit"]


class _Update(TypedDict):
    base: VersionName
    gates_asked: Digest  # of the options of gates
    rows: dict[str, Count]
    drift: dict[str, Number | _Figures | None]
    shared: Number
    decision: _Decision
    trained: NotRequired[Sha256 | None]


class _Gate(TypedDict):
    name: str
    passed: Flag
    found: dict[str, Any]
    bound: dict[str, Any]
    why: str


class _Inputs(TypedDict):
    queries: str | None
    qrels: str | None
    qrels_split: str | None
    by: list[str]


class _Loss(TypedDict):
    questions: Count
    loss: Number
    interval: tuple[Number, Number]


class _Stratum(_Loss):
    by: str
    value: str


class CertificateFacts(_Loss):
    """Loss to exact search of the raw embeddings; see ``certificate``."""

    inputs: _Inputs
    judgements: Digest | None  # None of pieces of documents
    measure: str
    raw: Number
    index: Number
    strata: list[_Stratum]
    strata_left_out: Count
    at_most: Number


class VersionManifest(Described):
    """Manifest of a version of an index, or of a candidate."""

    identity: Digest
    created: Annotated[str, AfterValidator(_time)]
    config: _Options
    store: str
    corpus: _Corpus
    encoder: EncoderFacts
    encoder_fingerprint: EncoderName
    runtimes: list[dict[str, str]]
    whitening: _Whitening
    choice: Annotated[dict[str, Any], AfterValidator(json_of(Choice))] | None
    rows: Positive
    counts: _Counts
    made_by: dict[str, Any]
    quality: NotRequired[_Figures | None]
    version: VersionName
    factory: _Factory
    bytes: _Bytes
    seconds: dict[str, Number]
    stage_rows: dict[str, Count]
    update: NotRequired[_Update]
    gates: NotRequired[list[_Gate]]
    certificate: NotRequired[CertificateFacts]
    models: NotRequired[dict[str, Any]]  # their comparison, before a migration
    bridge: NotRequired[dict[str, Any]]  # how old rows of a bridged version were mapped
    bridged_from: NotRequired[VersionName]  # that a migration goes on from, or back to


class WithdrawnFacts(TypedDict, total=False):
    """Facts of a version that was withdrawn, which outlive it."""

    encoder: Digest
    corpus: Digest
    identity: Digest


VERSION_SCHEMA = Schema("index", 1, VersionManifest)
