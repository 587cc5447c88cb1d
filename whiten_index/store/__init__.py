"""Raw embeddings on disk: what is encoded is kept, and found again by its texts."""

from whiten_index.store.dtypes import StoreDtype, as_kept, fits_float16, require_dtype, type_of
from whiten_index.store.encoder import EncoderFacts, TransformerFacts
from whiten_index.store.gathered import EmbeddingRows
from whiten_index.store.known import Found, KnownRows
from whiten_index.store.packs import Member, Packs, ToPack
from whiten_index.store.picks import OWN, Picks, Source, other_sources
from whiten_index.store.places import MOMENTS, InFolder, StoredShard, held_by_folder
from whiten_index.store.records import CorpusFile, CorpusPart, CorpusRecord, CorpusSource
from whiten_index.store.shards import Shards
from whiten_index.store.sizes import folder_bytes, keeps_moments, moments_bytes, rows_bytes
from whiten_index.store.store import EmbeddingStore, total_moments
from whiten_index.store.users import RegisteredIndex

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
