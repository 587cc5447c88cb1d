"""Codes that lie in blocks of rows, as a fast scan reads them, and the same codes one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.library import load_faiss

Codes = NDArray[np.uint8]
# FAISS 1.15 gives the codes of larger blocks back wrongly.
KNOWN_ROWS = 32


@dataclass(frozen=True, eq=False)
class Packer:
    """Takes codes out of an index's blocks, and puts them in.

    Attributes:
        packer: FAISS's own.
    """

    packer: Any

    @classmethod
    def of(cls, index: Any) -> Packer:
        """Return that of a fast-scan index, with or without lists."""
        return cls(index.get_CodePacker())

    @property
    def rows(self) -> int:
        """Rows in a block."""
        return int(self.packer.nvec)

    @property
    def size(self) -> int:
        """Bytes of a code."""
        return int(self.packer.code_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(self.packer.block_size)

    def blocks_of(self, pointer: Any, rows: int) -> Codes:
        """Return the blocks (b, bytes) of so many rows behind a pointer of FAISS, not copied."""
        return view_of(pointer, -(-rows // self.rows), self.block_bytes)

    def unpacked(self, blocks: Codes) -> Codes:
        """Return the codes (b · rows, size) of blocks (b, bytes), with what fills up the last."""
        pointer, blocks = load_faiss().swig_ptr, np.ascontiguousarray(blocks)
        codes = np.empty((len(blocks) * self.rows, self.size), dtype=np.uint8)
        for place, block in enumerate(blocks):
            self.packer.unpack_all(pointer(block), pointer(codes[place * self.rows :]))
        return codes

    def packed(self, codes: Codes) -> Codes:
        """Return the blocks (b, bytes) of codes (n, size), the last filled up with zeros."""
        pointer = load_faiss().swig_ptr
        blocks = np.zeros((-(-len(codes) // self.rows), self.block_bytes), dtype=np.uint8)
        filled = np.zeros((len(blocks) * self.rows, self.size), dtype=np.uint8)
        filled[: len(codes)] = codes
        for place, block in enumerate(blocks):
            self.packer.pack_all(pointer(filled[place * self.rows :]), pointer(block))
        return blocks


def view_of(pointer: Any, rows: int, size: int) -> Codes:
    """Return bytes (rows, size) behind a pointer of FAISS, not copied."""
    if not rows:
        return np.empty((0, size), dtype=np.uint8)
    view: Codes = load_faiss().rev_swig_ptr(pointer, rows * size).reshape(rows, size)
    return view
