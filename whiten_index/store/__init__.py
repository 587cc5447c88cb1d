"""Raw embeddings on disk: what is encoded is kept, and found again by its texts."""

from whiten_index.store.digest_index import Found, KnownRows
from whiten_index.store.dtypes import (
    StoreDtype,
    as_kept,
    fits_float16,
    folder_bytes,
    keeps_moments,
    moments_bytes,
    require_dtype,
    rows_bytes,
    type_of,
)
from whiten_index.store.embedding_store import EmbeddingStore, total_moments
from whiten_index.store.index_registry import RegisteredIndex
from whiten_index.store.packs import Member, Packs, ToPack
from whiten_index.store.records import (
    CorpusFile,
    CorpusPart,
    CorpusRecord,
    CorpusSource,
    EncoderFacts,
    TransformerFacts,
)
from whiten_index.store.row_refs import OWN, EmbeddingRows, Picks, Source, other_sources
from whiten_index.store.shard_resolver import MOMENTS, InFolder, StoredShard, held_by_folder
from whiten_index.store.shards import Shards

__all__ = [
    "MOMENTS",
    "OWN",
    "CorpusFile",
    "CorpusPart",
    "CorpusRecord",
    "CorpusSource",
    "EmbeddingRows",
    "EmbeddingStore",
    "EncoderFacts",
    "Found",
    "InFolder",
    "KnownRows",
    "Member",
    "Packs",
    "Picks",
    "RegisteredIndex",
    "Shards",
    "Source",
    "StoreDtype",
    "StoredShard",
    "ToPack",
    "TransformerFacts",
    "as_kept",
    "fits_float16",
    "folder_bytes",
    "held_by_folder",
    "keeps_moments",
    "moments_bytes",
    "other_sources",
    "require_dtype",
    "rows_bytes",
    "total_moments",
    "type_of",
]
