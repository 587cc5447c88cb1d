"""What both models share: how mteb names them, and what of its batches they take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mteb.models import ModelMeta

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.encoding import EncoderSpec
from whiten_index.errors import ConfigError

Batch = Mapping[str, Any]


def model_meta(
    spec: EncoderSpec, setting: str, identity: Mapping[str, Any], *, k: int | None
) -> ModelMeta:
    """Return the metadata under which mteb keeps results.

    Args:
        spec: of the encoder.
        setting: what is done with its embeddings, a part of the name.
        identity: all else that changes a score; name and revision tell it from others.
        k: width of the vectors, None where the corpus decides.
    """
    base = Path(spec.model).name
    whole = {"encoder": spec.fingerprint, "query_encoder": spec.query_fingerprint, **identity}
    on_hub = spec.revision is not None and "/" in spec.model
    return ModelMeta(
        loader=None,
        name=f"whiten-index/{re.sub(r'[^A-Za-z0-9_.-]+', '_', f'{base}-{setting}')}",
        revision=fingerprint(whole),
        release_date=None,
        languages=None,
        n_parameters=None,
        memory_usage_mb=None,
        max_tokens=spec.max_length,
        embed_dim=k,
        license=None,
        open_weights=None,
        public_training_code=None,
        public_training_data=None,
        framework=["PyTorch", "NumPy"],
        similarity_fn_name="cosine",
        use_instructions=bool(spec.query_prompt or spec.document_prompt),
        training_datasets=None,
        adapted_from=spec.model if on_hub else None,
    )


def field_of(batch: Batch, name: str) -> list[Any]:
    """Return a column of a batch.

    Raises:
        ConfigError: there is none, as in tasks on images or sounds.
    """
    if name not in batch:
        raise ConfigError(
            f"the task gives {', '.join(batch) or 'nothing'} and no {name}; this model takes tasks "
            "on texts"
        )
    return list(batch[name])


def require_float32(told: Mapping[str, Any]) -> None:
    """Refuse encode_kwargs that ask for vectors of another precision.

    Raises:
        ConfigError: they do.
    """
    precision = told.get("precision", "float32")
    if precision != "float32":
        raise ConfigError(
            f"encode_kwargs ask for precision {precision!r} and these vectors are float32; leave "
            "it out, or measure an index of fewer bits: IndexedSearch(factory='SQ8')"
        )
