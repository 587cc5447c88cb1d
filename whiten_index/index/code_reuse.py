"""Codes of a published index reused in a new one, byte for byte, with new rows among them.

The new index keeps the centroids, codebooks, transforms and settings of the published one. A row
that did not change keeps its code under its new row number. Graphs are rebuilt over the same codes,
because FAISS removes no rows from a graph.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import blocks
from whiten_index.errors import ArtifactError
from whiten_index.index.exact import Rows, Vectors
from whiten_index.index.factory import inner_of
from whiten_index.index.library import load_faiss
from whiten_index.index.ondisk_ivf import Codes, OnDiskLists, list_numbers

_ROWS = 8192
# FAISS 1.15 gives the codes of larger blocks back wrongly.
_BLOCK_ROWS = 32
# Kinds, without the kinds derived from them, which may keep more than codes.
_FLAT = ("IndexFlat", "IndexFlatIP", "IndexScalarQuantizer", "IndexPQ", "IndexRaBitQ", "IndexEDEN")
_FAST = ("IndexPQFastScan", "IndexRaBitQFastScan")
_GRAPHS = ("IndexHNSW", "IndexHNSWFlat", "IndexHNSWSQ")
_LISTS = (
    "IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ", "IndexIVFRaBitQ", "IndexIVFEDEN",
    "IndexIVFPQFastScan", "IndexIVFRaBitQFastScan",
)  # fmt: skip


def why_not_reusable(index: Any) -> str | None:
    """Return the reason why the codes of a kind of index cannot be reused, None if they can."""
    faiss = load_faiss()
    # A second name: FAISS frees the index with the last name of the object.
    inner = faiss.downcast_index(index)
    if isinstance(inner, faiss.IndexPreTransform):
        return why_not_reusable(inner.index)
    if isinstance(inner, faiss.IndexRefine):
        return why_not_reusable(inner.base_index) or why_not_reusable(inner.refine_index)
    kind = type(inner).__name__
    additive = (
        faiss.IndexAdditiveQuantizer, faiss.IndexAdditiveQuantizerFastScan,
        faiss.IndexIVFAdditiveQuantizer, faiss.IndexIVFAdditiveQuantizerFastScan,
    )  # fmt: skip
    why = None
    if kind in _GRAPHS:
        if not _is_flat(faiss.downcast_index(inner.storage)):
            why = "its graph is not over plain codes"
    elif kind in (*_FLAT, *_FAST, *_LISTS) or isinstance(inner, additive):
        if _is_fast(inner) and int(inner.bbs) != _BLOCK_ROWS:
            why = (
                f"FAISS gives codes in blocks of {int(inner.bbs)} rows back wrongly; blocks of "
                f"{_BLOCK_ROWS} work"
            )
    else:
        why = "its layout is not known here"
    return None if why is None else f"codes of an {kind} cannot be reused in another: {why}"


def reuse_codes(
    old: Any,
    new: Any,
    old_rows: Rows,
    vectors: Iterable[Vectors],
    *,
    on_disk: OnDiskLists | None = None,
) -> None:
    """Fill a new index with old rows' codes and new rows' vectors.

    ``old_rows`` (n,) has the row of the old index whose code each new row gets, −1 for a new row;
    a row may be reused several times. ``vectors`` has the blocks of the new rows. ``new`` is the
    file of ``old`` opened once more and emptied, because FAISS cannot copy all kinds. Its lists are
    built in memory, or by ``on_disk``, which the caller joins.
    """
    new_rows = np.flatnonzero(old_rows < 0)
    if on_disk is not None:
        first = 0
        for block in vectors:
            numbers = new_rows[first : first + len(block)]
            on_disk.add_codes(on_disk.inner.sa_encode(block), numbers)
            first += len(block)
        for codes, numbers in _entries(inner_of(old), old_rows):
            on_disk.add_codes(codes, numbers)
    else:
        # Each index inside that keeps codes gets those of all rows at once.
        coders = _coders(inner_of(new))
        pairs = zip(_coders(inner_of(old)), coders, strict=True)
        arrays = [_old_codes(each, coder, old_rows) for each, coder in pairs]
        first = 0
        for block in vectors:
            rows = new_rows[first : first + len(block)]
            for coder, array in zip(coders, arrays, strict=True):
                array[rows] = coder.sa_encode(block)
            first += len(block)
        for coder, array in zip(coders, arrays, strict=True):
            _add(coder, array)
        _complete(inner_of(new), len(old_rows))
    new.ntotal = len(old_rows)


def _coders(index: Any) -> list[Any]:
    """Return the indexes inside an index that keep codes, each of every row."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return [*_coders(index.base_index), *_coders(index.refine_index)]
    return _coders(index.storage) if isinstance(index, faiss.IndexHNSW) else [index]


def _old_codes(old: Any, new: Any, old_rows: Rows) -> Codes:
    """Return the codes (n, size) of ``sa_encode`` of old rows, with gaps for new rows."""
    shape = len(old_rows), int(new.sa_code_size())
    if _is_flat(new):
        # Filled in place: a copy would double the memory.
        new.codes.resize(shape[0] * shape[1])
        codes = _view(new.codes.data(), *shape)
    else:
        codes = np.empty(shape, dtype=np.uint8)
    if isinstance(new, load_faiss().IndexIVF):
        for some, numbers in _entries(old, old_rows):
            codes[numbers] = some
        return codes
    source = _unpacked(old, old.codes.get(), int(old.ntotal)) if _is_fast(old) else _flat(old)
    for start in range(0, len(old_rows), _ROWS):
        part = old_rows[start : start + _ROWS]
        codes[start : start + _ROWS][part >= 0] = source[part[part >= 0]]
    return codes


def _add(new: Any, codes: Codes) -> None:
    """Add the codes (n, size) of all rows to an index that keeps codes."""
    faiss = load_faiss()
    rows = len(codes)
    if isinstance(new, faiss.IndexIVF):
        if not _is_fast(new):
            new.add_sa_codes(codes, np.arange(rows))
            return
        width = int(new.coarse_code_size())
        lists = list_numbers(codes, width)
        order = np.argsort(lists, kind="stable")
        bounds = np.searchsorted(lists[order], np.arange(int(new.nlist) + 1))
        for number in np.flatnonzero(np.diff(bounds)):
            # A list in blocks takes packed codes, and only from its start on.
            numbers = order[bounds[number] : bounds[number + 1]]
            packed = _packed(new, codes[numbers, width:])
            pointers = faiss.swig_ptr(numbers), faiss.swig_ptr(packed)
            new.invlists.add_entries(int(number), len(numbers), *pointers)
    elif _is_fast(new):
        packed = _packed(new, codes)
        new.codes.resize(packed.size)
        if packed.size:
            faiss.rev_swig_ptr(new.codes.get(), packed.size)[:] = packed.ravel()
        new.ntotal2 = -(-rows // _BLOCK_ROWS) * _BLOCK_ROWS
    new.ntotal = rows


def _complete(new: Any, rows: int) -> None:
    """Set the rows of an index whose parts are filled, and build its graph."""
    faiss = load_faiss()
    new = faiss.downcast_index(new)
    if isinstance(new, faiss.IndexRefine):
        _complete(new.base_index, rows)
        _complete(new.refine_index, rows)
    elif isinstance(new, faiss.IndexHNSW):
        storage = faiss.downcast_index(new.storage)
        codes = _flat(storage).copy()
        storage.reset()
        for some in blocks(codes, _ROWS):
            new.add(storage.sa_decode(some))
        # Decoded and coded again, they need not be the same.
        if rows:
            _flat(storage)[:] = codes
    new.ntotal = rows


def _entries(index: Any, old_rows: Rows) -> Iterator[tuple[Codes, Rows]]:
    """Yield the codes of ``sa_encode`` of each list (m, size), and the new numbers of the rows."""
    order = np.argsort(old_rows, kind="stable")[np.count_nonzero(old_rows < 0) :]
    kept, seen = old_rows[order], np.zeros(len(old_rows), dtype=np.bool_)
    read = 0
    for number in range(int(index.nlist)):
        ids = list_ids(index, number)
        first, last = (np.searchsorted(kept, ids, side=side) for side in ("left", "right"))
        times = last - first
        places = np.repeat(np.arange(len(ids)), times)
        if not len(places):
            continue
        within = np.arange(len(places)) - np.repeat(np.cumsum(times) - times, times)
        numbers = order[np.repeat(first, times) + within]
        seen[numbers] = True
        read += len(numbers)
        yield list_codes(index, number, places), numbers
    found = int(np.count_nonzero(seen))
    if not found == read == len(kept):
        raise ArtifactError(
            f"the published index is damaged: its lists hold {found} of {len(kept)} rows; restore "
            "it from a copy, or build again"
        )


def list_ids(index: Any, number: int) -> Rows:
    """Return the row numbers (n,) of an inverted list, not copied."""
    lists = index.invlists
    rows = int(lists.list_size(number))
    if not rows:
        return np.empty(0, dtype=np.int64)
    ids: Rows = load_faiss().rev_swig_ptr(lists.get_ids(number), rows)
    return ids


def list_codes(index: Any, number: int, places: Rows) -> Codes:
    """Return codes of an inverted list, as ``sa_encode`` has them: after the number of the list."""
    rows, width = int(index.invlists.list_size(number)), int(index.coarse_code_size())
    pointer = index.invlists.get_codes(number)
    if _is_fast(index):
        codes = _unpacked(index, pointer, rows)
    else:
        codes = _view(pointer, rows, int(index.code_size))
    prefix = np.frombuffer(number.to_bytes(width, "little"), dtype=np.uint8)
    return np.hstack([np.broadcast_to(prefix, (len(places), width)), codes[places]])


def _is_flat(index: Any) -> bool:
    return type(index).__name__ in _FLAT or isinstance(index, load_faiss().IndexAdditiveQuantizer)


def _is_fast(index: Any) -> bool:
    faiss = load_faiss()
    return isinstance(index, faiss.IndexFastScan | faiss.IndexIVFFastScan)


def _flat(index: Any) -> Codes:
    """Return the codes (n, size) of an index that keeps them one by one, not copied."""
    size = int(index.code_size)
    return _view(index.codes.data(), int(index.codes.size()) // size, size)


def _view(pointer: Any, rows: int, size: int) -> Codes:
    """Return bytes (rows, size) behind a pointer of FAISS, not copied."""
    if not rows:
        return np.empty((0, size), dtype=np.uint8)
    view: Codes = load_faiss().rev_swig_ptr(pointer, rows * size).reshape(rows, size)
    return view


def _unpacked(index: Any, pointer: Any, rows: int) -> Codes:
    """Return the codes (rows, size) of blocks of a fast-scan index."""
    packer, swig_ptr = index.get_CodePacker(), load_faiss().swig_ptr
    blocks = _view(pointer, -(-rows // _BLOCK_ROWS), int(packer.block_size))
    codes = np.empty((len(blocks) * _BLOCK_ROWS, int(packer.code_size)), dtype=np.uint8)
    for place, block in enumerate(blocks):
        packer.unpack_all(swig_ptr(block), swig_ptr(codes[place * _BLOCK_ROWS :]))
    return codes[:rows]


def _packed(index: Any, codes: Codes) -> NDArray[np.uint8]:
    """Return the blocks (b, bytes) of codes (n, size), the last filled up with zeros."""
    packer, swig_ptr = index.get_CodePacker(), load_faiss().swig_ptr
    blocks = np.zeros((-(-len(codes) // _BLOCK_ROWS), int(packer.block_size)), dtype=np.uint8)
    filled = np.zeros((len(blocks) * _BLOCK_ROWS, int(packer.code_size)), dtype=np.uint8)
    filled[: len(codes)] = codes
    for place, block in enumerate(blocks):
        packer.pack_all(swig_ptr(filled[place * _BLOCK_ROWS :]), swig_ptr(block))
    return blocks


def remove_rows(index: Any) -> None:
    """Remove all rows of an opened index; FAISS's own ``reset`` cannot if they are mapped.

    Centroids and codebooks stay.
    """
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        remove_rows(index.index)
    elif isinstance(index, faiss.IndexRefine):
        remove_rows(index.base_index)
        remove_rows(index.refine_index)
    elif isinstance(index, faiss.IndexHNSW):
        index.hnsw.neighbors = faiss.MaybeOwnedVectorInt32()
        index.hnsw.reset()
        remove_rows(index.storage)
    elif isinstance(index, faiss.IndexIVF) and not _is_fast(index):
        lists = faiss.ArrayInvertedLists(int(index.nlist), int(index.code_size))
        index.replace_invlists(lists, True)
        lists.this.disown()
    elif isinstance(index, faiss.IndexFlatCodes):
        index.codes = faiss.MaybeOwnedVectorUInt8()
    else:
        index.reset()
    index.ntotal = 0
