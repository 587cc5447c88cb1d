"""Bits that are flipped in files, as a failing disk does."""

from pathlib import Path


def flip(path: Path, at: int | None = None, bit: int = 1) -> None:
    """Flip a bit of the byte at a place, which is the middle unless it is given."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= bit
    path.write_bytes(data)
