"""FAISS indexes by factory string, and the indexes inside an index."""

import re
from typing import Any

from whiten_index.errors import ConfigError
from whiten_index.index.library import first_line, load_faiss

_PROBED = 16
_MOST_CHARACTERS = 1_000
_WITHOUT_PARTS = re.compile(r"[A-Za-z]0+(?![0-9])|(HNSW|NSG)1(?![0-9])")


def inner_index(factory: str, k: int) -> Any:
    """Return an empty FAISS index over ``k`` dims, by inner product."""
    faiss = load_faiss()
    if len(factory) > _MOST_CHARACTERS:
        # FAISS's regular expressions recurse for each letter until the stack ends.
        raise ConfigError(f"a FAISS factory string has at most {_MOST_CHARACTERS} characters")
    if _WITHOUT_PARTS.search(factory):
        # FAISS itself would divide by zero and end the process.
        raise ConfigError(f"{factory!r} asks for no list, link or code at all; give it some")
    index = peer_index(factory, k)
    parts = _parts(index)
    if any(isinstance(part, faiss.IndexPreTransform) for part in parts):
        raise ConfigError(
            f"{factory!r} holds a transform of its own (PCA, OPQ, L2norm …), which would nest in "
            "the whitening; leave it out and choose the width with --k"
        )
    if isinstance(index, faiss.IndexRefine | faiss.IndexNSG):
        raise ConfigError(
            f"{factory!r} is a graph (NSG) or a refinement, which are not tuned to a recall here; "
            "use HNSW32, or score candidates again from the store by search --rerank"
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        # FAISS makes a graph over product codes by distance, whatever metric is given.
        raise ConfigError(
            f"FAISS makes {factory!r} by Euclidean distance only, and scores are inner products; "
            "use HNSW32, HNSW32_SQ8, or IVF with product codes"
        )
    if isinstance(index, faiss.IndexIDMap):
        raise ConfigError(
            f"{factory!r} maps ids, and rows are found by their number here; leave out IDMap"
        )
    lists = lists_of(index)
    if lists is not None:
        # FAISS's default is a single list.
        lists.nprobe = max(1, lists.nlist // _PROBED)
    return index


def peer_index(factory: str, dim: int) -> Any:
    """Return an empty index over ``dim`` raw dims by FAISS alone, its own transforms allowed."""
    faiss = load_faiss()
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"FAISS cannot make {factory!r} over {dim} dims ({first_line(error)}); see the FAISS "
            "factory strings, such as Flat, HNSW32, IVF1024,Flat or IVF1024,PQ16"
        ) from error
    for part in _parts(index):
        # It orders centroids for a search by Hamming distance, which is not used here, and takes a
        # hundred times as long as the training itself (measured: 52 s against 0.5 s).
        if hasattr(part, "do_polysemous_training"):
            part.do_polysemous_training = False
    return index


def _parts(index: Any) -> list[Any]:
    """Return an index and all indexes inside it."""
    faiss = load_faiss()
    inside = (
        getattr(index, name, None) for name in ("base_index", "quantizer", "storage", "index")
    )
    found = [faiss.downcast_index(part) for part in inside if part is not None]
    return [index, *(part for each in found for part in _parts(each))]


def inner_of(index: Any) -> Any:
    """Return the index behind the transforms; it lives as long as ``index`` does."""
    return load_faiss().downcast_index(index.index)


def lists_of(index: Any) -> Any:
    """Return the inverted lists inside an index, at any depth, or None."""
    try:
        return load_faiss().extract_index_ivf(index)
    except RuntimeError:
        return None


def is_graph(inner: Any) -> bool:
    """Return whether an index is an HNSW graph."""
    faiss = load_faiss()
    return isinstance(faiss.downcast_index(inner), faiss.IndexHNSW)


def is_exact(inner: Any) -> bool:
    """Return whether an index finds the exact neighbours by its structure: flat, in float32."""
    faiss = load_faiss()
    return isinstance(faiss.downcast_index(inner), faiss.IndexFlat)
