"""The encoder with its whitening as one model of sentence-transformers, in plain files.

Such a folder gives whitened vectors wherever ``SentenceTransformer(folder).encode`` runs, without
this package. It is written without sentence-transformers too. Its modules are the encoder's own
Transformer, WeightedLayerPooling where other layers than the last are averaged, Pooling, the
encoder's own steps after that, a Normalize where the transform was fitted on unit vectors, then::

    Dense       d -> k, weight Wᵀ and bias −μW in float32, no activation
    Normalize   to unit length, unless the index ranks by dot product
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from whiten_index.artifacts.atomic import replace_folder
from whiten_index.artifacts.manifest import (
    Described,
    Digest,
    Schema,
    describe_files,
    listed_files,
    write_manifest,
)
from whiten_index.encoding.export_st import MARK, Module, flush, pooling_module, write_folder
from whiten_index.encoding.model_files import POOLING_FLAGS, weight_files
from whiten_index.encoding.models import ENCODER_CLASSES, ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.errors import ConfigError
from whiten_index.search.query_transform import QueryTransform
from whiten_index.whitening.transform import Affine


def export_model(transform: QueryTransform, folder: Path | str) -> dict[str, Any]:
    """Write a folder that ``SentenceTransformer`` loads, whole or not at all.

    ``encode`` and ``encode_document`` take the encoder's document prompt, ``encode_query`` its
    query prompt. The folder is new, empty, or written by this function before.

    Return the ``modules``, ``computes_in`` (always float32) and ``encoder_dtype`` (what the index's
    encoder computes in).
    """
    spec, model = transform.model_folder()
    if spec.pooling not in POOLING_FLAGS:
        raise ConfigError(
            f"sentence-transformers does not pool by {spec.pooling}; it can pool by "
            f"{', '.join(POOLING_FLAGS)}, so encode the corpus again by one of these"
        )
    family = str(model.config.get("model_type"))
    if model.config.get("is_encoder_decoder") and family not in ENCODER_CLASSES:
        raise ConfigError(
            f"sentence-transformers takes the encoder alone of {', '.join(ENCODER_CLASSES)} "
            f"models only, and {spec.model} is a {family}; choose another encoder"
        )
    affine = transform.whitening.export()
    modules = _modules(spec, model, affine)
    facts = {
        "modules": ["Transformer", *(module.kind for module in modules)],
        "computes_in": "float32",
        "encoder_dtype": spec.dtype,
    }

    def make(path: Path) -> None:
        write_folder(path, spec, model, modules, similarity=affine.similarity)
        fields = _SCHEMA.headed(
            files=describe_files(path), facts=facts, dim=transform.dim, k=transform.k,
            encoder_fingerprint=transform.fingerprint, query_digest=transform.query_digest,
            version=transform.version,
        )  # fmt: skip
        write_manifest(path / MARK, fields)
        flush(path)

    replace_folder(folder, make, files=_files, what="an exported sentence-transformers model")
    return facts


def _modules(spec: EncoderSpec, model: ModelFolder, affine: Affine) -> list[Module]:
    """Return all modules but the first."""
    modules = []
    if spec.layers != (model.layers,):
        # The mean of some hidden states, as weights of 1 and 0 from the lowest one on.
        lowest = min(spec.layers)
        chosen = [float(layer in spec.layers) for layer in range(lowest, model.layers + 1)]
        layers = {
            "word_embedding_dimension": model.hidden_size,
            "layer_start": lowest,
            "num_hidden_layers": model.layers,
        }
        shares = {"layer_weights": np.array(chosen, dtype=np.float32)}
        modules.append(Module("WeightedLayerPooling", layers, shares))
    modules.append(pooling_module(spec, model.hidden_size))
    for dense in model.head:
        files = [dense.path / "config.json", *weight_files(dense.path)]
        modules.append(Module("Dense", files=files))
    if affine.normalize_input:
        modules.append(Module("Normalize"))
    rows, columns = affine.matrix.shape
    config = {
        "in_features": rows,
        "out_features": columns,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    weights = {"linear.weight": affine.matrix.T, "linear.bias": affine.bias}
    modules.append(Module("Dense", config, weights))
    return [*modules, Module("Normalize")] if affine.similarity == "cosine" else modules


class _Exported(Described):
    """Fields of the file that marks an export."""

    facts: dict[str, Any]
    dim: int
    k: int
    encoder_fingerprint: Digest
    query_digest: Digest
    version: str


_SCHEMA = Schema("sentence-transformers model", 1, _Exported)
_files = partial(listed_files, schema=_SCHEMA, name=MARK)
