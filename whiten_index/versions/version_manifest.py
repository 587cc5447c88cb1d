"""Schemas of the files of an index: the manifest of a version, and ``CURRENT``."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, StringConstraints, with_config
from typing_extensions import TypedDict

from whiten_index.artifacts.manifest import (
    Count,
    Described,
    Digest,
    Flag,
    Integer,
    Number,
    Positive,
    Schema,
    Sealed,
    Sha256,
    Share,
)
from whiten_index.store.records import CorpusSource, EncoderFacts

KIND, FORMAT_VERSION = "index", 1


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
    weight_column: str | None


class _Counts(TypedDict):
    read: Count
    encoded: Count
    reused: Count
    truncated: Count
    passages: Count
    duplicates: Count
    tokens: Count
    padded_tokens: Count
    out_of_memory: Count
    skipped: dict[str, Count]
    remade_shards: Count
    float32_shards: Count
    kept_files: Count


class _Whitening(TypedDict):
    kind: str
    dim: Positive
    k: Positive
    exponent: Number
    center: Flag
    normalize_input: Flag
    groups: NotRequired[Positive]
    group_size: NotRequired[Positive]
    shuffle: NotRequired[Flag]
    seed: NotRequired[Integer]
    estimator: NotRequired[str]
    shrinkage: NotRequired[Number]
    floor: NotRequired[Number]
    remove_top: NotRequired[Count]
    directions: NotRequired[Count]
    rank: Count
    condition_number: Number | None
    variance_kept: Share
    rows: Number


class _Setting(TypedDict):
    k: Positive
    exponent: Number
    center: Flag


class _Candidate(_Setting):
    score: Number
    error: Number
    leads: Flag


class ChoiceFacts(TypedDict):
    """Choice of a transform; see ``Choice``."""

    rule: Literal["pieces", "spectrum", "labels"]
    chosen: _Setting
    measure: str
    sample: Count
    why: str
    candidates: list[_Candidate]


class _IndexBytes(TypedDict):
    codes: Count
    ids: Count
    lists: Count
    graph: Count
    matrix: Count
    codebooks: Count
    centroids: Count
    total: Count


class _Tuned(TypedDict):
    parameters: dict[str, Count]
    recall: Share | None
    target: Number
    reached: Flag
    queries: Count


class _Factory(TypedDict):
    asked: str
    built: str
    why: str
    expected_bytes: _IndexBytes
    expected_recall: Number | None
    nprobe: Count | None
    tuned: _Tuned
    rerank: Count | None
    memory_budget: Count | None
    device: str
    mapped: Flag
    rotated: Flag


class _Bytes(TypedDict):
    raw: Count
    vectors: Count
    index_file: Count
    documents_file: Count
    index: _IndexBytes


class _Geometry(TypedDict):
    rows: Count
    mean_cosine: Number
    isoscore: Number
    effective_rank: Number
    uniformity: Number
    hubness: Number
    zero_rows: Count
    neighbours: Count


class _Geometries(TypedDict):
    raw: _Geometry
    vectors: _Geometry


class _Faiss(TypedDict):
    version: str
    variant: str
    gpus: Count


class _Runtime(TypedDict):
    torch: str
    transformers: str
    tokenizers: str
    inputs: Literal["packed", "padded"]


class _MadeBy(TypedDict):
    whiten_index: str
    faiss: _Faiss
    numpy: str
    python: str


class _Changes(TypedDict):
    total: Count
    new: Count
    changed: Count
    document: Count
    deleted: Count
    unchanged: Count


class _Decision(TypedDict):
    whitening: Literal["keep", "refit"]
    why: str
    threshold: Number
    index: Literal["keep", "train"]
    index_why: str


class _Eigenvalues(TypedDict):
    least: Number | None
    median: Number | None
    most: Number | None


class _Drift(TypedDict):
    rows_fitted: Number
    rows_today: Number
    rows_shared: Number
    dims: Count
    eigenvalues: _Eigenvalues
    mean_shift: Number | None
    mean_shift_rms: Number | None
    kl_per_dim: Number | None
    kl_mean_per_dim: Number | None
    kl_covariance_per_dim: Number | None
    kl_of_refit: Number | None
    sampling_kl: Number | None
    noise_kl: Number | None
    variance_kept_at_fit: Number | None
    variance_kept: Number | None
    variance_possible: Number | None
    variance_lost: Number | None
    noise_variance: Number | None


class _Update(TypedDict):
    base: VersionName
    rows: _Changes
    drift: _Drift
    shared: Number
    decision: _Decision
    trained: NotRequired[Sha256 | None]


class _Gate(TypedDict):
    name: str
    passed: Flag
    found: dict[str, Any]
    bound: dict[str, Any]
    why: str


class VersionManifest(Described):
    """Manifest of a version of an index, or of a candidate."""

    identity: Digest
    created: Annotated[str, AfterValidator(_time)]
    config: _Options
    store: str
    corpus: _Corpus
    encoder: EncoderFacts
    encoder_fingerprint: Digest
    runtimes: list[_Runtime]
    whitening: _Whitening
    choice: ChoiceFacts | None
    rows: Count
    counts: _Counts
    made_by: _MadeBy
    geometry: _Geometries | None
    version: VersionName
    factory: _Factory
    bytes: _Bytes
    seconds: dict[str, Number]
    stage_rows: dict[str, Count]
    update: NotRequired[_Update]
    gates: NotRequired[list[_Gate]]


class WithdrawnFacts(TypedDict, total=False):
    """Facts of a version that was withdrawn, which outlive it."""

    corpus: Digest
    identity: Digest


class CurrentFields(TypedDict):
    """Fields of ``CURRENT``."""

    version: VersionName
    manifest_sha256: Sha256
    withdrawn: tuple[VersionName, ...]
    withdrawn_facts: dict[VersionName, WithdrawnFacts]
    digest: Sha256


VERSION_SCHEMA = Schema(KIND, FORMAT_VERSION, VersionManifest)
CURRENT_SCHEMA = Schema("published index", 1, CurrentFields)
