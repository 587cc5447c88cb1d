"""Codecs of vectors by the names a user gives them, and what FAISS calls them."""

from __future__ import annotations

import re
from collections.abc import Callable

from whiten_index.errors import ConfigError

FP32 = "fp32"


def _quantized(parts: int) -> Callable[[int], str]:
    """Return what names product quantization in ``k / parts`` bytes of 8 bits."""

    def name(k: int) -> str:
        if k % parts:
            raise ConfigError(f"product quantization by {parts} dims a byte does not divide k")
        return f"PQ{k // parts}"

    return name


def _fast_scan(k: int) -> str:
    if k % 4:
        raise ConfigError("product quantization in 4 bits by 2 dims takes a k that 4 divides")
    return f"PQ{k // 2}x4fs"


# Codec -> its part of a FAISS factory string over k dims.
CODECS: dict[str, Callable[[int], str]] = {
    FP32: lambda _: "Flat",
    "fp16": lambda _: "SQfp16",
    "sq8": lambda _: "SQ8",
    "sq6": lambda _: "SQ6",
    "sq4": lambda _: "SQ4",
    "pq": _quantized(4),
    "pqfs": _fast_scan,
    "rabitq": lambda _: "RaBitQ",
    "rabitq2": lambda _: "RaBitQ2",
    "rabitq4": lambda _: "RaBitQ4",
}
_PQ_BYTES = re.compile(r"pq([1-9][0-9]*)")
# FAISS's own names start with a capital, ours never do.
_OF_FAISS = re.compile(r"[A-Z][A-Za-z0-9_]*")
# Codecs so coarse that their best hits are worth being ranked again.
COARSE = ("pq", "rabitq", "sq4")


def require_codec(codec: str) -> None:
    """Refuse a codec nobody knows.

    Raises:
        ConfigError: it is unknown.
    """
    if not (codec in CODECS or _PQ_BYTES.fullmatch(codec) or _OF_FAISS.fullmatch(codec)):
        raise ConfigError(
            f"--codecs {codec!r} is unknown; use {', '.join(CODECS)}, pqN for N bytes a vector, or "
            "what FAISS calls a codec in its factory strings, such as PRQ16x3x8"
        )


def codec_string(codec: str, k: int) -> str:
    """Return a codec's part of a FAISS factory string over ``k`` dims.

    Raises:
        ConfigError: k does not allow it.
    """
    if codec in CODECS:
        return CODECS[codec](k)
    if _OF_FAISS.fullmatch(codec):
        return codec
    found = _PQ_BYTES.fullmatch(codec)
    assert found is not None, "unknown codecs are refused before"
    if k % int(found[1]):
        raise ConfigError(f"{codec} cuts vectors into {found[1]} parts, and k = {k} is no multiple")
    return f"PQ{found[1]}"
