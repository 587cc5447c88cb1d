"""Which indexes can be made on disk, from blocks of vectors, where memory has no room for them.

Two kinds can: flat codes, which are written behind the head of the file that FAISS itself writes
(``streamed``), and inverted lists, spilled in parts that are joined list by list (``spilled``).
"""

from __future__ import annotations

from typing import Any

from whiten_index.index.library import load_faiss

IVF_DATA = "index.ivfdata"


def kind_on_disk(inner: Any) -> str | None:
    """Return ``codes`` or ``lists`` where an index can be made on disk, else None."""
    faiss = load_faiss()
    flat = (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexPQ, faiss.IndexRaBitQ)
    if isinstance(inner, flat):
        return "codes"
    if not isinstance(inner, faiss.IndexIVF) or isinstance(inner, faiss.IndexIVFPQR):
        return None
    kept = faiss.downcast_InvertedLists(inner.invlists)
    # Fast-scan codes are interleaved in blocks, and Panorama's are kept by level: only lists of
    # their own, some of which inherit from plain ones, understand these.
    return "lists" if type(kept) is faiss.ArrayInvertedLists else None
