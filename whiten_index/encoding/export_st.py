"""Folders of sentence-transformers, written without it."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from whiten_index.artifacts.files import fsync_path, is_file, list_folder, resolved, walk_files
from whiten_index.artifacts.manifest import write_json
from whiten_index.encoding.model_files import POOLING_FLAGS, weight_files
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.errors import EncoderError

_HOME = "sentence_transformers.models."
MARK = "whiten_index.json"
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "LICENSE*", "NOTICE*")
# Files of the modules that the model had, or about them.
_LEFT = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", MARK,
    "data_config.json", "adapter_config.json",
)  # fmt: skip
# Where the cache of a hub keeps the files of models, by digest.
_BLOB = re.compile(r"/blobs/[0-9a-f]{40,64}$")


@dataclass(frozen=True, eq=False)
class Module:
    """A module after the first: its class, configuration, and weights or files to copy."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    files: Sequence[Path] = ()


def pooling_module(spec: EncoderSpec, width: int) -> Module:
    """Return the pooling of an encoder whose hidden states have that width."""
    flags = {flag: mode == spec.pooling for mode, flag in POOLING_FLAGS.items()}
    config = {"word_embedding_dimension": width, **flags, "include_prompt": True}
    return Module("Pooling", config)


def write_folder(
    path: Path,
    spec: EncoderSpec,
    model: ModelFolder,
    modules: Sequence[Module],
    *,
    weights: bool = True,
    similarity: str = "cosine",
) -> None:
    """Make a folder of a model's own files, with its weights or without, and of more modules.

    Raises:
        EncoderError: a file of the model changed since it was opened, or is a link to a file that
            belongs to no model.
    """
    path.mkdir()
    for pattern in _COPIED:
        for file in list_folder(model.path, pattern):
            index = file.name.endswith(".index.json") and not weights
            if file.name not in _LEFT and not index and is_file(file):
                _copy(file, path, model)
    for file in weight_files(model.path) if weights else ():
        _copy(file, path, model)
    config = dict(model.config)
    # Otherwise the weights would be loaded in the type of their file.
    config |= dict.fromkeys(("dtype", "torch_dtype"), "float32")
    if spec.layers != (model.layers,):
        config["output_hidden_states"] = True
    write_json(path / "config.json", config)
    limits = {"max_seq_length": spec.max_length, "do_lower_case": spec.lower_case}
    write_json(path / "sentence_bert_config.json", limits)
    settings = {
        "prompts": {"query": spec.query_prompt, "document": spec.document_prompt},
        # A text is a document unless it is called a query, as it is here.
        "default_prompt_name": "document" if spec.document_prompt else None,
        "similarity_fn_name": similarity,
    }
    write_json(path / "config_sentence_transformers.json", settings)
    _write_modules(path, modules, model)
    model.require_unchanged()


def _copy(file: Path, folder: Path, model: ModelFolder) -> None:
    """Copy a file of a model, which somebody else may have made, to a folder for others."""
    found = resolved(file)
    if not found.is_relative_to(resolved(model.root)) and not _BLOB.search(str(found)):
        raise EncoderError(
            f"{file} of model {model.name} is a link to a file outside of the model; if it belongs "
            "to the model, put a copy in its place"
        )
    shutil.copyfile(found, folder / file.name)


def _write_modules(path: Path, modules: Sequence[Module], model: ModelFolder) -> None:
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_HOME}Transformer"}]
    for number, module in enumerate(modules, start=1):
        name = f"{number}_{module.kind}"
        inside = path / name
        inside.mkdir()
        for file in module.files:
            _copy(file, inside, model)
        if not module.files:
            write_json(inside / "config.json", dict(module.config))
        if module.weights:
            arrays = {key: np.ascontiguousarray(value) for key, value in module.weights.items()}
            data = save(arrays, metadata={"format": "pt"})
            (inside / "model.safetensors").write_bytes(data)
        entry = {"idx": number, "name": str(number), "path": name, "type": _HOME + module.kind}
        listed.append(entry)
    (path / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")


def flush(path: Path) -> None:
    """Flush a folder with all its files to the disk."""
    files = list(walk_files(path))
    for each in (*files, *{file.parent for file in files}, path):
        fsync_path(each)
