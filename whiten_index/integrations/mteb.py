"""The encoder with its whitening as a model of MTEB, for every task on texts."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.encoding.window_encoder import WindowEncoder
from whiten_index.errors import ConfigError
from whiten_index.integrations.lazy import importing
from whiten_index.search.search_index import open_index
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening

with importing("mteb", of="MTEB", extra="mteb"):
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ScoringFunction
    from mteb.types import PromptType

_ROWS = 8192
_SIDES = ("document", "query")


class WhitenedEncoder(AbsEncoder):
    """An encoder and a transform fitted beforehand, as ``mteb.EncoderProtocol``.

    Its vectors are those that an index holds: transformed, then of unit length unless the
    similarity is the dot product; without a transform, that of the model. MTEB files results
    by name and revision. The revision stands for the encoder, its prompts and the numbers of the
    transform, so results of another fit are never taken for these. MTEB gives texts piece by piece,
    so a transform cannot be fitted on a task while it runs; fit it on the task's texts before.

    Attributes:
        encoder: of texts.
        whitening: applied to its embeddings; None for none.
        symmetric: ``document`` or ``query``: prompt of texts in tasks without queries, such as STS;
            models of the E5 family want ``query`` there.
    """

    def __init__(
        self,
        encoder: WindowEncoder,
        whitening: Whitening | None = None,
        *,
        symmetric: str = "document",
    ) -> None:
        """Join an encoder and a transform that was fitted on its embeddings.

        Raises:
            ConfigError: ``symmetric`` is unknown.
        """
        if symmetric not in _SIDES:
            raise ConfigError(f"symmetric {symmetric!r} is unknown; use {' or '.join(_SIDES)}")
        self.encoder, self.whitening, self.symmetric = encoder, whitening, symmetric
        k = encoder.dim if whitening is None else whitening.k
        similarity = (whitening or encoder.spec).similarity
        self._cosine = similarity != "dot"
        kind = "none" if whitening is None else whitening.kind.value
        spec = encoder.spec
        identity = {
            "encoder": spec.fingerprint,
            "query_encoder": spec.query_fingerprint,
            "whitening": None if whitening is None else whitening.digest,
            "symmetric": symmetric,
            "similarity": similarity,
        }
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{Path(spec.model).name}-{kind}-k{k}")
        known = {
            "name": f"whiten-index/{name}",
            "revision": fingerprint(identity),
            "max_tokens": spec.max_length,
            "embed_dim": k,
            "similarity_fn_name": ScoringFunction("cosine" if self._cosine else "dot"),
            "use_instructions": bool(spec.query_prompt or spec.document_prompt),
        }
        # Name and revision under which MTEB files results.
        self.mteb_model_meta = ModelMeta.create_empty(known)

    @classmethod
    def of_index(
        cls, folder: Path | str, *, symmetric: str = "document", **options: Any
    ) -> "WhitenedEncoder":
        """Take encoder and transform of a published index; ``options`` are of ``open_index``."""
        index = open_index(folder, **options)
        return cls(index.encoder, index.bundle.whitening, symmetric=symmetric)

    def encode(
        self, inputs: Iterable[Any], *, prompt_type: PromptType | None = None, **_: Any
    ) -> NDArray[np.float32]:
        """Return the vectors of the texts of a data loader, (n, k) float32.

        Queries get the encoder's query prompt, documents its document prompt. Batches are filled by
        tokens, so a batch size is ignored.

        Raises:
            ConfigError: the whitening is for embeddings of another width.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        side = self.symmetric if prompt_type is None else prompt_type.value
        encode = self.encoder.encode_queries if side == "query" else self.encoder.encode
        vectors = encode(texts)
        if self.whitening is None:
            rows = vectors.astype(np.float64)
            return (unit_rows(rows) if self._cosine else rows).astype(np.float32)
        # In float64, a block at a time.
        blocks = np.array_split(vectors, len(vectors) // _ROWS + 1)
        white = [self.whitening.vectors(each).astype(np.float32) for each in blocks]
        return np.concatenate(white)
