"""Files of a model's folder: JSON read with suspicion, weights found and digested."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, list_folder, reading, sha256_file
from whiten_index.artifacts.limits import load_json, read_bounded
from whiten_index.artifacts.manifest import canonical_json
from whiten_index.errors import EncoderError


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        EncoderError: the file cannot be read or is not JSON.
    """
    try:
        with reading(path):
            return load_json(read_bounded(path).decode())
    except (OSError, ValueError) as error:
        raise EncoderError(f"{path} cannot be read ({error}); restore the model folder") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is no file or no object in it."""
    value = read_json(path) if exists(path) else {}
    return value if isinstance(value, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that a loader takes, as transformers chooses; empty for none."""
    tensors = list_folder(folder, "*.safetensors")
    if any(exists(folder / f"model.safetensors{end}") for end in ("", ".index.json")):
        return tensors
    return list_folder(folder, "pytorch_model*.bin") or tensors


def files_sha256(files: list[Path], *, name: str, folder: Path, what: str) -> str:
    """Return one digest of files, in their order.

    Raises:
        EncoderError: there are no files, or they cannot be read.
    """
    if not files:
        raise EncoderError(f"{folder} holds no {what} for model {name}; complete the folder")
    try:
        with reading(folder):
            facts = [(file, file.stat()) for file in files]
            digests = [_file_sha256(file, stat.st_size, stat.st_mtime_ns) for file, stat in facts]
    except OSError as error:
        raise EncoderError(
            f"{what} of model {name} in {folder} cannot be read ({error.strerror}); change their "
            "permissions"
        ) from error
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _file_sha256(path: Path, size: int, changed: int) -> str:  # noqa: ARG001 (part of the key)
    """Return a file's digest, computed once for as long as size and time of change stay."""
    return sha256_file(path)


# Classes of torch.nn that take no argument; no other name in a model's folder is ever imported.
ACTIVATIONS = (
    "Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "Mish", "Softplus",
)  # fmt: skip
_HOME = "sentence_transformers."
_HEAD = ("Dense", "LayerNorm", "Normalize")
# Read here, or without effect on embeddings.
_SETTINGS = ("max_seq_length", "do_lower_case", "query_length", "document_length", "unpad_inputs")
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, kw_only=True)
class HeadStep:
    """One step from the pooled hidden states towards the embedding.

    Attributes:
        kind: Dense (linear, then an activation), LayerNorm or Normalize (to unit length).
        path: folder with its weights.
        in_features: width it takes.
        out_features: width it gives.
        bias: whether a Dense adds a bias.
        activation: one of ``ACTIVATIONS``, applied by a Dense.
        residual: whether a Dense adds its input, projected where the widths differ.
        weights_sha256: digest of its weights, None where it has none.
    """

    kind: str
    path: Path = field(compare=False)
    in_features: int
    out_features: int
    bias: bool = False
    activation: str = "Identity"
    residual: bool = False
    weights_sha256: str | None = None


def head_sha256(head: Sequence[HeadStep]) -> str | None:
    """Return the identity of a head: its steps and weights in order; None where there is none."""
    if not head:
        return None
    steps = [{k: v for k, v in asdict(step).items() if k != "path"} for step in head]
    return hashlib.sha256(canonical_json(steps).encode()).hexdigest()


def read_modules(path: Path) -> list[dict[str, Any]]:
    """Return the modules of a folder in order, none where it is not of sentence-transformers."""
    file = path / "modules.json"
    if not exists(file):
        return []
    value = read_json(file)
    modules = value if isinstance(value, list) else []
    if not modules or not all(isinstance(m, dict) and m.get("type") for m in modules):
        raise EncoderError(f"{file} is damaged: it lists no modules; restore the model folder")
    return modules


def module_folder(path: Path, module: dict[str, Any]) -> Path:
    """Return where a module's files are."""
    return path / str(module.get("path", ""))


def weighty(module: dict[str, Any]) -> bool:
    """Tell whether a module after the first has weights."""
    return _type_of(module) in ("Dense", "LayerNorm")


def refuse_unknown(name: str, modules: list[dict[str, Any]]) -> None:
    """Refuse a folder with a step that would be left out, or taken in another order.

    Raises:
        EncoderError: a module is not known, or comes before the pooling.
    """
    kinds = [_type_of(module) for module in modules]
    if kinds and kinds[0] != "Transformer":
        raise EncoderError(
            f"model {name} starts with {kinds[0]}, and only the Transformer of "
            "sentence-transformers is run here, so its embeddings would be wrong; take out "
            "modules.json to use the transformer alone, or choose another model"
        )
    start = kinds.index("Pooling") + 1 if "Pooling" in kinds else 1
    allowed = _HEAD if "Pooling" in kinds else ("Normalize",)
    unknown = [*kinds[1 : max(start - 1, 1)], *(k for k in kinds[start:] if k not in allowed)]
    if unknown:
        raise EncoderError(
            f"model {name} ends with {', '.join(unknown)}, which is not applied here, so its "
            "embeddings would be wrong; take out modules.json to use the transformer alone, or "
            "choose another model"
        )


def refuse_settings(name: str, settings: dict[str, Any]) -> None:
    """Refuse settings in ``sentence_bert_config.json`` that change embeddings and are not applied.

    Raises:
        EncoderError: there is one.
    """
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    plain: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        # Inputs of other kinds than texts are never given.
        "modality_config": {**(settings.get("modality_config") or {}), "text": text},
    }
    consent = {"trust_remote_code": True}
    unknown = [
        key
        for key, value in settings.items()
        if value and key not in _SETTINGS and value not in (plain.get(key), consent)
    ]
    if unknown:
        raise EncoderError(
            f"sentence_bert_config.json of model {name} sets {', '.join(unknown)}, which is not "
            "applied here, so its embeddings would be wrong; take it out, or choose another model"
        )


def read_pooling(path: Path, modules: list[dict[str, Any]]) -> tuple[str | None, bool]:
    """Return the pooling a folder asks for, None where it asks for none, and ``include_prompt``.

    Several modes are joined by ``+``, and a configuration without any gives the empty string.
    """
    for module in modules:
        if _type_of(module) == "Pooling":
            file = module_folder(path, module) / "config.json"
            config = read_object(file)
            if not config:
                raise EncoderError(
                    f"{file} is missing or empty, which says how the model pools; complete the "
                    "model folder"
                )
            return _pooling_mode(config), bool(config.get("include_prompt", True))
    return None, True


def normalizes(modules: list[dict[str, Any]]) -> bool:
    """Tell whether the last step is an L2 normalisation."""
    return len(modules) > 1 and _type_of(modules[-1]) == "Normalize"


def read_head(
    name: str, path: Path, modules: list[dict[str, Any]], *, width: int
) -> tuple[HeadStep, ...]:
    """Return the steps after the pooling, a normalisation at the end left out.

    Raises:
        EncoderError: a step lacks its weights or is not what can be applied here.
    """
    listed = [module for module in modules[1:] if _type_of(module) in _HEAD]
    while listed and _type_of(listed[-1]) == "Normalize":
        listed.pop()
    head: list[HeadStep] = []
    for module in listed:
        before = head[-1].out_features if head else width
        step = _READ[_type_of(module)](name, module_folder(path, module), before)
        if step.in_features != before:
            raise EncoderError(
                f"{step.kind} in {step.path} takes {step.in_features} numbers and is given "
                f"{before}; restore the folder of model {name}, or choose another model"
            )
        head.append(step)
    return tuple(head)


def _type_of(module: dict[str, Any]) -> str:
    """Return the class of a module of sentence-transformers itself, else the whole dotted name."""
    dotted = str(module.get("type", ""))
    return dotted.rpartition(".")[2] if dotted.startswith(_HOME) else dotted


def _pooling_mode(config: dict[str, Any]) -> str:
    modes = config.get("pooling_mode") or [
        mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)
    ]
    listed = [modes] if isinstance(modes, str) else list(modes)
    return "+".join("last" if mode == "lasttoken" else str(mode) for mode in listed)


def _read_dense(name: str, folder: Path, _: int) -> HeadStep:
    config = _config(folder)
    return HeadStep(
        kind="Dense",
        path=folder,
        in_features=_positive(folder, config, "in_features"),
        out_features=_positive(folder, config, "out_features"),
        bias=bool(config.get("bias", True)),
        activation=_activation(folder, config),
        residual=bool(config.get("use_residual", False)),
        weights_sha256=_weights(name, folder),
    )


def _read_layer_norm(name: str, folder: Path, _: int) -> HeadStep:
    width = _positive(folder, _config(folder), "dimension")
    return HeadStep(
        kind="LayerNorm",
        path=folder,
        in_features=width,
        out_features=width,
        weights_sha256=_weights(name, folder),
    )


def _read_normalize(_: str, folder: Path, before: int) -> HeadStep:
    _config(folder)
    return HeadStep(kind="Normalize", path=folder, in_features=before, out_features=before)


_READ = {"Dense": _read_dense, "LayerNorm": _read_layer_norm, "Normalize": _read_normalize}


def _config(folder: Path) -> dict[str, Any]:
    """Return a step's configuration, refused where it works on something else than embeddings."""
    config = read_object(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise EncoderError(
                f"{folder / 'config.json'} sets {key} to {config[key]!r}: only steps on the pooled "
                "embedding are applied here; choose another model"
            )
    return config


def _positive(folder: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EncoderError(
            f"{folder / 'config.json'} gives {key} as {value!r} and a positive number is needed; "
            "restore the model folder"
        )
    return value


def _activation(folder: Path, config: dict[str, Any]) -> str:
    # Without one sentence-transformers takes Tanh.
    dotted = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = dotted.rpartition(".")[2]
    if not dotted.startswith("torch.nn.") or name not in ACTIVATIONS:
        raise EncoderError(
            f"{folder / 'config.json'} asks for the activation {dotted!r}, and of torch.nn only "
            f"{', '.join(ACTIVATIONS)} are known here; choose another model"
        )
    return name


def _weights(name: str, folder: Path) -> str:
    return files_sha256(weight_files(folder), name=name, folder=folder, what="weights")
