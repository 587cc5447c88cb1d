"""Files of a model: fetched from the hub; JSON, weights, and modules of sentence-transformers."""

import contextlib
import errno
import functools
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import (
    exists,
    is_file,
    is_folder,
    is_link,
    list_folder,
    open_file,
    read_bounded,
    reading,
    resolved,
    sha256_file,
    state_of,
    walk_files,
)
from whiten_index.artifacts.limits import VECTOR_NUMBERS, canonical_json, load_json
from whiten_index.errors import (
    ArtifactError,
    EncoderError,
    StorageError,
    WhitenIndexError,
    first_line,
)

# Files that no loader reads.
NO_CONTENT = (".*", "*.md", "LICENSE", "LICENSE.txt", "NOTICE", "*.png", "*.jp*g", "*.pyc")
# Functions by which transformers looks for files, and ours, which raise errors of the system.
_ASKED = {"isfile": is_file, "isdir": is_folder}
_ASKING = threading.RLock()


class NotRunError(EncoderError):
    """A folder with a module or setting that is not run here, and that the library might run.

    Attributes:
        reason: of the refusal, in a few words.
    """

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(
            f"model {name} {reason}, which is not run here, so its embeddings would be wrong; "
            f"{remedy}, let sentence-transformers run it with --trust-remote-code if you trust the "
            "folder and the classes that it names, or choose another model"
        )
        self.reason = reason


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    try:
        with reading(path):
            return load_json(read_bounded(path).decode())
    except (OSError, ValueError) as error:
        raise EncoderError(f"{path} cannot be read ({error}); restore the model folder") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without a file, or if it holds no object."""
    value = read_json(path) if exists(path) else {}
    return value if isinstance(value, dict) else {}


def inside(folder: Path, name: Any) -> Path:
    """Return the path that a file of a model names, which may be neither outside nor hidden.

    Files behind a link to a folder are not seen by ``walk_files``.
    """
    path, found = Path(str(name)), folder
    if path.is_absolute() or any(part.startswith(".") for part in path.parts):
        raise EncoderError(f"a file of {folder} names {str(name)!r}, outside of it or hidden")
    for part in path.parts:
        found /= part
        if is_link(found) and is_folder(found):
            raise EncoderError(
                f"{found} links to a folder, whose files would change unnoticed; copy it into the "
                "model folder"
            )
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that a loader takes, as transformers chooses; empty for none."""
    files = list_folder(folder, "*.safetensors")
    if not any(exists(folder / f"model.safetensors{end}") for end in ("", ".index.json")):
        files = list_folder(folder, "pytorch_model*.bin") or files
    parts = {
        inside(folder, name)
        for index in list_folder(folder, "*.index.json")
        for name in set(map(str, dict(read_object(index).get("weight_map") or {}).values()))
    }
    found = [*files, *sorted(parts - {*files})]
    # A configuration may name a file of weights, which then comes first.
    if named := read_object(folder / "config.json").get("transformers_weights"):
        found.append(inside(folder, named))
    return found


def files_sha256(files: list[Path], *, name: str, folder: Path, what: str) -> str:
    """Return one digest of files, in their order."""
    if not files:
        raise EncoderError(f"{folder} holds no {what} for model {name}; complete the folder")
    try:
        with reading(folder):
            digests = [_file_sha256(file, state_of(file)) for file in files]
    except (ArtifactError, OSError) as error:
        raise EncoderError(
            f"{what} of model {name} cannot be read ({error}); change their "
            "permissions, or restore the model folder"
        ) from error
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def require_readable(folder: Path, error: BaseException) -> None:
    """Raise ``StorageError`` if the system kept the files of a model from being loaded.

    safetensors and transformers take its errors for the absence of a file; ``error`` is theirs.
    """
    for path in walk_files(folder, leave_out=NO_CONTENT):
        with contextlib.suppress(OSError), reading(path):
            open_file(path).close()
            if isinstance(error, FileNotFoundError) and (
                # safetensors names the file in its text alone.
                str(error.filename) == str(path)
                or str(error).endswith((f": {path}", f': "{path}"'))
            ):
                raise StorageError(
                    f"{path} could not be opened, though it is there; run the same command again"
                )


@contextlib.contextmanager
def loading_model(what: str, folder: Path) -> Iterator[None]:
    """Turn the errors of libraries that cannot load a model into an ``EncoderError``.

    Those of the system are a ``StorageError``. The model's files are all below ``folder``.
    """
    try:
        with reading(what), _asking_again(folder):
            yield
    except (ArtifactError, StorageError):
        raise
    except BaseException as error:
        # They raise all sorts of errors; a panic of Rust derives from ``BaseException``.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        require_readable(folder, error)
        raise EncoderError(
            f"{what} cannot be loaded ({type(error).__name__}: {first_line(error)[:160]}); "
            "check the folder, or --trust-remote-code if the model comes with code you trust"
        ) from error


@contextlib.contextmanager
def _asking_again(folder: Path) -> Iterator[None]:
    """Let no library take an error of the system for the absence of a file below a folder.

    ``os.path.isfile`` says "no" to both, and without a file transformers makes other tokenizers.
    """
    with _ASKING:
        asked = {name: getattr(os.path, name) for name in _ASKED}

        def again(name: str, path: Any) -> bool:
            below = isinstance(path, str | Path) and Path(path).is_relative_to(folder)
            return asked[name](path) or (below and _ASKED[name](path))

        try:
            for name in asked:
                setattr(os.path, name, functools.partial(again, name))
            yield
        finally:
            for name, function in asked.items():
                setattr(os.path, name, function)


@functools.lru_cache(maxsize=64)
def _file_sha256(path: Path, state: tuple[int, ...]) -> str:  # noqa: ARG001 (part of the key)
    digest, kept = sha256_file(path), resolved(path)
    # The hub's cache links to large files under their digests.
    if re.fullmatch("[0-9a-f]{64}", kept.name) and kept.name != digest:
        raise EncoderError(
            f"{path} is damaged: the hub has other content; remove {kept}, and run the same "
            "command again, which fetches it"
        )
    return digest


# Classes of torch.nn that take no argument; no other name in a model's folder is ever imported.
ACTIVATIONS = (
    "Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "Mish", "Softplus",
)  # fmt: skip
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}
_TRANSFORMER_ALONE = "take out modules.json to use the transformer alone"
_HOME = "sentence_transformers."
# Read here, or without effect on embeddings.
_SETTINGS = ("max_seq_length", "do_lower_case", "unpad_inputs")


@dataclass(frozen=True)
class FolderModule:
    """A module of a sentence-transformers folder.

    ``kind`` is the class of sentence-transformers, or the whole dotted name of another one.
    """

    kind: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear map and an activation, after the pooling."""

    path: Path = field(compare=False)
    in_features: int
    out_features: int
    bias: bool
    activation: str
    weights_sha256: str


def head_sha256(head: Sequence[Dense]) -> str | None:
    """Return the identity of the dense layers after the pooling; None without any."""
    if not head:
        return None
    steps = [{k: v for k, v in asdict(step).items() if k != "path"} for step in head]
    return hashlib.sha256(canonical_json(steps).encode()).hexdigest()


def read_modules(path: Path) -> list[FolderModule]:
    """Return the modules of a folder in order, none if it is not of sentence-transformers."""
    file = path / "modules.json"
    if not exists(file):
        return []
    value = read_json(file)
    modules = value if isinstance(value, list) else []
    if not modules or not all(isinstance(m, dict) and m.get("type") for m in modules):
        raise EncoderError(f"{file} is damaged: it lists no modules; restore the model folder")
    names = [str(module["type"]) for module in modules]
    kinds = [name.rpartition(".")[2] if name.startswith(_HOME) else name for name in names]
    folders = [inside(path, module.get("path", "")) for module in modules]
    return list(map(FolderModule, kinds, folders))


def is_static(modules: Sequence[FolderModule]) -> bool:
    """Return whether a folder's model is a table with a row for each token."""
    return bool(modules) and modules[0].kind == "StaticEmbedding"


def refuse_unknown(name: str, modules: Sequence[FolderModule]) -> None:
    """Refuse a folder with a step that would be skipped, or applied in another order."""
    kinds = [module.kind for module in modules]
    static = is_static(modules)
    if kinds and kinds[0] != "Transformer" and not static:
        raise NotRunError(name, f"starts with {kinds[0]}", _TRANSFORMER_ALONE)
    while kinds[1:] and kinds[-1] == "Normalize":
        kinds.pop()
    pooled = kinds[1:2] == ["Pooling"]
    allowed = "Dense" if static or pooled else None
    if unknown := [kind for kind in kinds[1 + pooled :] if kind != allowed]:
        named = [kind for kind in unknown if kind != "Pooling"] or unknown
        raise NotRunError(name, f"ends with {', '.join(named)}", _TRANSFORMER_ALONE)


def refuse_settings(name: str, settings: dict[str, Any]) -> None:
    """Refuse settings of sentence-transformers that change embeddings and are not applied."""
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
        reason = f"sets {', '.join(unknown)} in sentence_bert_config.json"
        raise NotRunError(name, reason, "take it out")


def read_pooling(name: str, modules: Sequence[FolderModule]) -> str | None:
    """Return the pooling of a folder, None without one.

    Several modes are joined by ``+``, and a configuration without any gives the empty string.
    """
    for module in modules:
        if module.kind == "Pooling":
            file = module.path / "config.json"
            config = read_object(file)
            if not config:
                raise EncoderError(
                    f"{file} is missing or empty, which says how the model pools; complete the "
                    "model folder"
                )
            flagged = [mode for mode, flag in POOLING_FLAGS.items() if config.get(flag)]
            modes = config.get("pooling_mode") or flagged
            listed = [modes] if isinstance(modes, str) else list(modes)
            if not config.get("include_prompt", True):
                raise NotRunError(name, "leaves prompts out of its pooling", _TRANSFORMER_ALONE)
            return "+".join("last" if mode == "lasttoken" else str(mode) for mode in listed)
    return None


def read_head(name: str, modules: Sequence[FolderModule], *, width: int) -> tuple[Dense, ...]:
    """Return the dense layers after the pooling, which gives embeddings of ``width``."""
    head: list[Dense] = []
    for module in modules:
        if module.kind == "Dense":
            head.append(_dense(name, module.path, head[-1].out_features if head else width))
    return tuple(head)


def _dense(name: str, folder: Path, width: int) -> Dense:
    file = folder / "config.json"
    config = read_object(file)
    plain = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
    for key, value in {**plain, "use_residual": False}.items():
        if config.get(key, value) not in (None, value):
            reason = f"sets {key} to {config[key]!r} in {folder.name}"
            raise NotRunError(name, reason, _TRANSFORMER_ALONE)
    before, after = widths = [config.get(key, 0) for key in ("in_features", "out_features")]
    if not all(isinstance(width, int) and 0 < width <= VECTOR_NUMBERS for width in widths):
        raise EncoderError(
            f"{file} has no in_features or out_features from 1 to {VECTOR_NUMBERS:,}; "
            "restore the model folder"
        )
    if before != width:
        raise EncoderError(
            f"Dense in {folder} takes {before} numbers and is given {width}; restore the folder "
            f"of model {name}, or choose another model"
        )
    # Without an activation sentence-transformers takes Tanh.
    dotted = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = dotted.rpartition(".")[2]
    if activation not in ACTIVATIONS or not dotted.startswith("torch.nn."):
        raise NotRunError(name, f"has the activation {dotted!r}", _TRANSFORMER_ALONE)
    return Dense(
        path=folder,
        in_features=before,
        out_features=after,
        bias=bool(config.get("bias", True)),
        activation=activation,
        weights_sha256=files_sha256(weight_files(folder), name=name, folder=folder, what="weights"),
    )


# Files that are fetched from the hub.
_WANTED = ("*.json", "*.txt", "*.model", "*.safetensors", "*.py")
_ONNX = "onnx/model.onnx*"  # with the file of its weights
_UNWANTED = ["onnx/*", "openvino/*", "*.onnx"]
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Hub:
    """A repository of the hub; ``otherwise`` is another way to have the model, for errors."""

    name: str
    revision: str | None
    local_files_only: bool
    otherwise: str = ""

    def fetch_model(self, *, onnx: bool) -> Path:
        """Return the folder of a commit, fetching the files of a model that it lacks."""
        path = self.fetch(*_WANTED)
        if not exists(path / "modules.json") and self._has_modules(path.name):
            self.fetch(*_WANTED, revision=path.name)
        modules = read_modules(path)
        holders = {each.path for each in modules if each.kind not in ("Pooling", "Normalize")}
        # Pickled weights are fetched only of a module that has no safetensors.
        more = [
            (folder.relative_to(path) / "pytorch_model*.bin").as_posix()
            for folder in sorted(holders or {path})
            if not list_folder(folder, "*.safetensors")
        ]
        if more := [*more, *([_ONNX] if onnx else [])]:
            self.fetch(*more, revision=path.name)
        return path

    def fetch(self, *patterns: str, revision: str | None = None) -> Path:
        """Return the folder of a commit; without network the cache alone is asked."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        try:
            return Path(
                snapshot_download(
                    self.name,
                    revision=revision or self.revision,
                    allow_patterns=list(patterns),
                    ignore_patterns=None if _ONNX in patterns else _UNWANTED,
                    local_files_only=self.local_files_only,
                )
            )
        except Exception as error:
            # The hub's client raises errors of several libraries here.
            if self.local_files_only:
                raise self._not_here() from error
            if isinstance(error, HFValidationError):
                raise EncoderError(
                    f"model {self.name!r} is neither a folder here nor a name on the hub; check "
                    "the spelling"
                ) from error
            raise self._explained(error) from None

    def _has_modules(self, commit: str) -> bool:
        """Return whether the model is one of sentence-transformers, which a cache may not say.

        Other libraries keep the transformer alone, whose embeddings would be others.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import RemoteEntryNotFoundError

        asked = self.name, "modules.json"
        # It is also known there that the hub has no such file.
        if try_to_load_from_cache(*asked, revision=commit) is not None:
            return False
        if self.local_files_only:
            raise self._not_here()
        try:
            hf_hub_download(*asked, revision=commit)
        except RemoteEntryNotFoundError:
            return False
        except Exception as error:
            raise self._explained(error) from None
        return True

    def _shown(self) -> str:
        of = "" if self.revision is None else f" at revision {self.revision!r}"
        return f"model {self.name!r}{of}"

    def _not_here(self) -> EncoderError:
        return EncoderError(
            f"{self._shown()} is not on this machine and is not fetched unasked; if you trust it, "
            "name it with --model (in Python model=) and leave out --local-files-only, which "
            "fetches it from the hub, or name the folder that it is in now"
            f"{self.otherwise}"
        )

    def _explained(self, error: Exception) -> WhitenIndexError:
        from huggingface_hub import constants, errors

        hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
        # If the cache does not help either, the client's error is about that, with the real one
        # inside.
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
        reason = cause or error
        shown = f"{type(reason).__name__}: {first_line(reason)[:160]}"
        # Only errors of files have a file name or such a number; errors of the network have
        # neither.
        if isinstance(reason, OSError) and (reason.filename or reason.errno in _FULL_DISK):
            return StorageError(
                f"model {self.name!r} cannot be kept in {cache} ({shown}); make room there, or set "
                "HF_HOME to another folder"
            )
        return EncoderError(
            f"{self._shown()} is no folder here, nor whole in the cache {cache}, and cannot be "
            f"fetched from {hub} ({shown}); check the spelling, --revision, the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, and run this again, which keeps the files that came "
            f"whole; if it is private or gated, ask for access at {hub}/{self.name}, then log in "
            "with 'hf auth login' or set HF_TOKEN; or give a local folder"
            f"{self.otherwise}"
        )
