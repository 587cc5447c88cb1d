"""Embeddings of twelve fixed texts, by which a model that has changed is noticed.

A digest of files does not show that a library computes other embeddings than it did, and of a model
behind an API there are no files. Store and index record these embeddings, and each session compares
its own with them.
"""

import base64
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.encoding.spec import EncoderSpec, RemoteSpec, Spec, recorded_spec
from whiten_index.errors import ArtifactError, EncoderError

if TYPE_CHECKING:
    from whiten_index.encoding.window_encoder import WindowEncoder

_LOG = logging.getLogger(__name__)
# Texts whose embeddings differ from model to model: languages, code, numbers, short and long.
CANARY = (
    "A cat sat on the mat.", "The central bank raised its interest rate by half a point.",
    "Wie spät ist es in Tokio?", "東京は日本の首都です。", "def add(a, b): return a + b",
    "SELECT name FROM users WHERE age > 30;", "3.14159265358979", "hello",
    "Mitochondria release the energy that is stored in glucose.", "¿Dónde está la biblioteca?",
    "The contract may be terminated by either party with thirty days' written notice.",
    "How do I reset my password?",
)  # fmt: skip
# Least cosines of the same model, and of one that has changed a little. The second pair is for
# types other than float32, which differ between machines: MiniLM in float32 has a cosine of 0.99997
# with itself in bfloat16.
_SAME, _NEARLY = 0.999, 0.9999
_SAME_NARROW, _NEARLY_NARROW = 0.95, 0.98
_ALIKE = 0.99  # of texts of a corpus; another model's are far below
# Of a unit vector less the mean; below, rounding alone could look like a change.
_LEAST_LENGTH, _LEAST_LENGTH_NARROW = 0.001, 0.05


def spec_with_canary(encoder: "WindowEncoder") -> Spec:
    """Return the identity of an encoder with its embeddings of the texts, if it takes one."""
    if encoder.spec.canary:
        return encoder.spec
    try:
        rows = encoder.encode(CANARY)
    except EncoderError:
        # A tokenizer or model may not take Japanese, say.
        rows = np.zeros((len(CANARY), encoder.dim), np.float32)
        for row, text in enumerate(CANARY):
            with suppress(EncoderError):
                rows[row] = encoder.encode([text])[0]
        if not rows.any():
            return encoder.spec  # nothing to compare: a model that cannot be run, say
    return replace(encoder.spec, canary=encode_canary(rows))


def encode_canary(embeddings: NDArray[np.float32]) -> str:
    """Return the embeddings (12, d) of the texts as base64 of unit vectors in float32."""
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    # A text without any known word has an embedding of zeros.
    unit = embeddings / np.where(lengths > 0, lengths, 1)
    return base64.b64encode(unit.astype("<f4").tobytes()).decode()


def keeping_canary(encoder: Mapping[str, Any], recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a store's encoder with the canary that was recorded first; see ``require_alike``."""
    now, known = recorded_spec(encoder), recorded_spec(recorded)
    if now is None or known is None or now.fingerprint != known.fingerprint or not known.canary:
        return encoder
    require_alike(known, now)
    kept = replace(now, canary=known.canary).to_json()
    return {**encoder, "query_encoder": kept} if encoder["kind"] == "column" else kept


def without_canary(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded encoder without its canary, which differs by rounding between machines."""
    kept = {key: value for key, value in encoder.items() if key != "canary"}
    if (query := encoder.get("query_encoder")) is not None:
        kept["query_encoder"] = without_canary(query)
    return kept


def require_alike(recorded: Spec, now: Spec) -> None:
    """Compare the canaries of one model at two times, if both are known.

    A small difference is logged.

    Raises:
        EncoderError: the model has changed.
        ArtifactError: the recorded canary is damaged.
    """
    if not now.canary or (isinstance(recorded, EncoderSpec) and not recorded.canary):
        return
    try:
        before, after = (
            np.frombuffer(base64.b64decode(each.canary), "<f4").reshape(len(CANARY), each.dim)
            for each in (recorded, now)
        )
    except ValueError as error:
        raise ArtifactError(
            f"the recorded embeddings of {recorded.model} are damaged ({error}); build with "
            "another --out and --store"
        ) from error
    narrow = isinstance(now, EncoderSpec) and now.dtype != "float32"
    least = _LEAST_LENGTH_NARROW if narrow else _LEAST_LENGTH
    cosine = _least_cosine(before.astype(float), after.astype(float), least)
    same_from, nearly_from = (_SAME_NARROW, _NEARLY_NARROW) if narrow else (_SAME, _NEARLY)
    found = f"the cosine of one of twelve fixed texts with its recorded embedding is {cosine:.5f}"
    if not cosine >= same_from:
        raise EncoderError(f"{now.described} has changed: {found}; {_remedy(recorded)}")
    if cosine < nearly_from:
        _LOG.warning("%s has changed a little: %s", now.described, found)


def is_alike(before: NDArray[np.float32], after: NDArray[np.float32]) -> bool:
    """Return whether embeddings (m, d) of the same texts are likely to be of one model.

    Texts of one corpus are alike, so that their mean stays: less that, noise would count much.
    """
    one, other = before.astype(float), after.astype(float)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    same = (one * other).sum(axis=1) >= _ALIKE * lengths
    return bool((same & (one.any(axis=1) == other.any(axis=1))).all())


def _least_cosine(before: NDArray[np.float64], after: NDArray[np.float64], least: float) -> float:
    """Return the least cosine of rows, less the mean of those ``before``.

    Whitening subtracts a mean too, which would hide a change of the rest. The mean stays
    in rows that would be shorter than ``least`` without it.
    """
    known = before.any(axis=1)
    mean = before[known].mean(axis=0) if known.any() else np.zeros(before.shape[1])
    differ = (before != after).any(axis=1)  # zeros, of texts that the model does not take, do not
    before, after = before[differ], after[differ]
    long = np.linalg.norm(before - mean, axis=1, keepdims=True) >= least
    one, other = before - mean * long, after - mean * long
    with np.errstate(invalid="ignore"):
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        return float(((one * other).sum(axis=1) / lengths).min(initial=1.0))


def _remedy(recorded: Spec) -> str:
    if isinstance(recorded, RemoteSpec):
        return (
            f"ask an endpoint that has the old model ({recorded.served} at {recorded.endpoint}), "
            "or build a new index and store with the new one"
        )
    return (
        "install the versions of torch, transformers and tokenizers that it was built with "
        "(whiten-index inspect shows them as runtimes), use --backend torch if an ONNX file "
        "computed, or build a new index and store"
    )
