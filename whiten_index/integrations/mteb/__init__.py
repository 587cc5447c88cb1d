"""The encoder with its whitening as a model of MTEB, and an index as its way of searching.

``WhitenedEncoder`` runs every task on texts. ``IndexedSearch`` runs retrieval and reranking through
an index as it is published, so that what is measured is the index: its transform fitted on the
task's own corpus, its embeddings rounded as the store keeps them, its kind of search.
"""

from whiten_index.errors import ConfigError

try:
    import mteb  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"MTEB's tasks need the package mteb ({error}); pip install 'whiten-index[mteb]'"
    ) from error

from whiten_index.integrations.mteb.encoder import WhitenedEncoder
from whiten_index.integrations.mteb.search import IndexedSearch

__all__ = ["IndexedSearch", "WhitenedEncoder"]
