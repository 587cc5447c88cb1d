"""The encoder with its whitening as one model of sentence-transformers, in plain files.

Such a folder gives whitened vectors wherever ``SentenceTransformer(folder).encode`` runs, without
this package. It is written without sentence-transformers too. Its modules are the encoder's own
Transformer, WeightedLayerPooling where other layers than the last are averaged, Pooling, the
encoder's own steps after that, a Normalize where the transform was fitted on unit vectors, then::

    Dense       d -> k, weight Wᵀ and bias −μW in float32, no activation
    Normalize   to unit length
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from whiten_index.encoding import EncoderSpec, ModelFolder
from whiten_index.encoding.model_files import weight_files
from whiten_index.errors import ArtifactError, ConfigError, FormatError
from whiten_index.manifest import fsync_path, read_manifest, write_manifest
from whiten_index.reduce import QueryTransform
from whiten_index.replaced import replace_folder
from whiten_index.whitening.export import Affine

KIND, FORMAT_VERSION = "sentence-transformers model", 1
MARK = "whiten_index.json"
_HOME = "sentence_transformers.models."
_WHAT = "an exported sentence-transformers model"
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*", "NOTICE*")
# What belongs to the modules of the model as it was, or describes it.
_LEFT = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", MARK,
    "data_config.json",
)  # fmt: skip
_POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}
# Of encoder-decoder models, sentence-transformers takes the encoder of these.
_ENCODERS_TAKEN = ("t5", "mt5")


@dataclass(frozen=True, eq=False)
class _Module:
    """A module after the first: its class, configuration, and weights or a folder to copy."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    source: Path | None = None


def export_model(transform: QueryTransform, folder: Path | str) -> dict[str, Any]:
    """Write a folder that ``SentenceTransformer`` loads, whole or not at all.

    ``encode`` and ``encode_document`` take the encoder's document prompt, ``encode_query`` its
    query prompt.

    Args:
        transform: of an index whose encoder is known; the model's files must be at hand.
        folder: new, empty, or written by this function before.

    Returns:
        ``file``, ``dim``, ``k``, the ``modules``, ``computes_in`` (always float32),
        ``encoder_dtype`` (what the index's encoder computes in), the ``error`` that float32
        and the mean folded into a bias cost (see ``Affine``), and the ``query_digest``.

    Raises:
        ConfigError: the index knows no encoder, its encoder cannot be expressed, or the folder
            holds something else.
        FormatError: a later release exported to the folder.
        EncoderError: the model is gone, or is not the one the index was built with.
        OutputError: the disk is full or cannot be written.
    """
    spec, model = transform.model_folder()
    _require_expressible(spec, model)
    affine = transform.whitening.export()
    modules = _modules(spec, model, affine)
    names = ["Transformer", *(module.kind for module in modules)]
    facts = {
        "file": str(folder),
        "dim": transform.dim,
        "k": transform.k,
        "modules": names,
        "computes_in": "float32",
        "encoder_dtype": spec.dtype,
        "error": affine.error,
        "query_digest": transform.query_digest,
    }

    def make(path: Path) -> None:
        path.mkdir()
        _write_transformer(path, spec, model)
        _write_modules(path, modules)
        _write_settings(path, spec)
        told = {key: value for key, value in facts.items() if key not in ("file", "query_digest")}
        made = {
            "encoder_fingerprint": transform.fingerprint,
            "query_digest": transform.query_digest,
            "version": transform.version,
        }
        contents = [
            each.relative_to(path).as_posix()
            for each in sorted(path.rglob("*"))
            if not each.is_dir() or not any(each.iterdir())
        ]
        identity = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "contents": contents,
            **made,
            **told,
        }
        write_manifest(path / MARK, identity)
        _flush(path)

    replace_folder(folder, make, files=_files, what=_WHAT)
    return facts


def _require_expressible(spec: EncoderSpec, model: ModelFolder) -> None:
    if spec.dtype == "int8":
        raise ConfigError(
            "sentence-transformers runs no encoder in eight bits as this index's does (--dtype "
            "int8); what it can express is float32, bfloat16 and float16, so encode the corpus "
            "again in one of these"
        )
    if spec.pooling not in _POOLING_FLAGS:
        raise ConfigError(
            f"sentence-transformers does not pool by {spec.pooling}; it can pool by "
            f"{', '.join(_POOLING_FLAGS)}, so encode the corpus again by one of these"
        )
    family = model.config.get("model_type")
    if model.config.get("is_encoder_decoder") and family not in _ENCODERS_TAKEN:
        raise ConfigError(
            f"sentence-transformers takes the encoder alone of {' and '.join(_ENCODERS_TAKEN)} "
            f"models only, and {spec.model} is a {family}; choose another encoder"
        )


def _modules(spec: EncoderSpec, model: ModelFolder, affine: Affine) -> list[_Module]:
    """Return all modules but the first."""
    modules = []
    if spec.layers != (model.layers,):
        modules.append(_layer_mean(spec, model))
    flags = {flag: mode == spec.pooling for mode, flag in _POOLING_FLAGS.items()}
    width = {"word_embedding_dimension": model.hidden_size}
    modules.append(_Module("Pooling", {**width, **flags, "include_prompt": spec.pools_prompt}))
    modules += [
        _Module(step.kind, source=None if step.kind == "Normalize" else step.path)
        for step in model.head
    ]
    if affine.normalize_input:
        modules.append(_Module("Normalize"))
    rows, columns = affine.matrix.shape
    config = {
        "in_features": rows,
        "out_features": columns,
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    weights = {"linear.weight": affine.matrix.T, "linear.bias": affine.bias}
    return [*modules, _Module("Dense", config, weights), _Module("Normalize")]


def _layer_mean(spec: EncoderSpec, model: ModelFolder) -> _Module:
    """Return the mean of some hidden states, as weights of 1 and 0 from the lowest one on."""
    lowest = min(spec.layers)
    chosen = [float(layer in spec.layers) for layer in range(lowest, model.layers + 1)]
    config = {
        "word_embedding_dimension": model.hidden_size,
        "layer_start": lowest,
        "num_hidden_layers": model.layers,
    }
    return _Module(
        "WeightedLayerPooling", config, {"layer_weights": np.array(chosen, dtype=np.float32)}
    )


def _write_transformer(path: Path, spec: EncoderSpec, model: ModelFolder) -> None:
    for pattern in _COPIED:
        for file in sorted(model.path.glob(pattern)):
            if file.name not in _LEFT and file.is_file():
                shutil.copyfile(file, path / file.name)
    for file in weight_files(model.path):
        shutil.copyfile(file, path / file.name)
    config = dict(model.config)
    # Else the weights are loaded in the type in which they are kept.
    config |= dict.fromkeys(("dtype", "torch_dtype"), "float32")
    if spec.layers != (model.layers,):
        config["output_hidden_states"] = True
    _write_json(path / "config.json", config)
    settings = {"max_seq_length": spec.max_length, "do_lower_case": spec.lower_case}
    _write_json(path / "sentence_bert_config.json", settings)


def _write_modules(path: Path, modules: list[_Module]) -> None:
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_HOME}Transformer"}]
    for number, module in enumerate(modules, start=1):
        name = f"{number}_{module.kind}"
        inside = path / name
        inside.mkdir()
        if module.source is not None:
            shutil.copytree(module.source, inside, dirs_exist_ok=True)
        else:
            _write_json(inside / "config.json", dict(module.config))
        if module.weights:
            arrays = {key: np.ascontiguousarray(value) for key, value in module.weights.items()}
            data = save(arrays, metadata={"format": "pt"})
            (inside / "model.safetensors").write_bytes(data)
        entry = {"idx": number, "name": str(number), "path": name, "type": _HOME + module.kind}
        listed.append(entry)
    (path / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")


def _write_settings(path: Path, spec: EncoderSpec) -> None:
    prompts = {"query": spec.query_prompt, "document": spec.document_prompt}
    settings = {
        "prompts": prompts,
        # What is encoded as neither is a document, as it is here.
        "default_prompt_name": "document" if spec.document_prompt else None,
        "similarity_fn_name": "cosine",
    }
    _write_json(path / "config_sentence_transformers.json", settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    for each in (*path.rglob("*"), path):
        fsync_path(each)


def _files(folder: Path) -> Collection[str] | None:
    """Return the files of a folder that was exported, None of another one.

    Raises:
        FormatError: a later release exported it.
        OutputError: the disk does not let it be read.
    """
    try:
        fields = read_manifest(folder, kind=KIND, version=FORMAT_VERSION, name=MARK)
    except FormatError:
        raise
    except ArtifactError:
        return None
    return {MARK, *(fields.get("contents") or ())}
