"""Which shards keep their moments in a file, and how many bytes a shard takes on disk."""

from __future__ import annotations

# Beside each row's embedding: the digest of its text, and whether that was cut.
_FACTS = 16 + 1
# Of a derived shard's row also its source and its place there, int32 each.
_PICK = 4 + 4
# Header of a safetensors file, and manifest of a shard's folder, about.
_HEADER, _MANIFEST = 400, 900
# What a manifest says of one source, about: two digests, indented.
_SOURCE = 150


def keeps_moments(rows: int, dim: int) -> bool:
    """Tell whether a shard of so many rows keeps its moments in a file.

    Those of fewer rows than d would take more room than the rows, at 4 bytes a number, and more
    time to read than to take anew.
    """
    return rows >= dim


def moments_bytes(rows: int, dim: int) -> int:
    """Return the size of the file of a shard's moments, 0 where it keeps none."""
    # The upper triangle of the scatter, mean and cubic moment, count and quartic moment; float64.
    numbers = dim * (dim + 1) // 2 + 2 * dim + 2
    return _HEADER + 8 * numbers if keeps_moments(rows, dim) else 0


def rows_bytes(rows: int, dim: int, itemsize: int) -> int:
    """Return what the rows of a shard take where they are whole, moments not counted.

    Args:
        rows: n.
        dim: d.
        itemsize: bytes of a number.
    """
    return rows * (dim * itemsize + _FACTS)


def folder_bytes(
    rows: int, dim: int, itemsize: int, *, own: int | None = None, sources: int = 0
) -> int:
    """Return about what a shard takes in a folder of its own.

    Args:
        rows: n.
        dim: d.
        itemsize: bytes of a number.
        own: rows that a derived shard holds itself, None where it is whole.
        sources: how many others a derived shard picks from.
    """
    files = _HEADER + _MANIFEST + moments_bytes(rows, dim)
    if own is None:
        return files + rows_bytes(rows, dim, itemsize)
    return files + own * dim * itemsize + rows * (_FACTS + _PICK) + sources * _SOURCE
