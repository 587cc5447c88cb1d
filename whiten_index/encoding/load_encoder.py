"""Find a model and load its encoder: one of this machine, or one behind an API.

Importing this loads no torch.
"""

from typing import Any

from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec, RemoteSpec, Spec, local_model
from whiten_index.encoding.window_encoder import WindowEncoder
from whiten_index.errors import require_installed


def load_encoder(model: str | None = None, **options: Any) -> WindowEncoder:
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

    A model behind an API is asked for its canary, and has no folder.
    """
    if config.remote:
        from whiten_index.encoding.endpoint import ask_spec

        return ask_spec(config), None

    def shape(folder: ModelFolder) -> tuple[int, int | None]:
        # Other code than what is recorded must not run.
        if isinstance(recorded, EncoderSpec):
            return recorded.dim, recorded.max_length
        require_installed("torch", by=f"model {folder.name}", extra="encode")
        from whiten_index.encoding.fallback import fallback_shape

        return fallback_shape(folder, config)

    return local_model(config, shape=shape)


def make_encoder(spec: Spec, folder: ModelFolder | None, config: EncoderConfig) -> WindowEncoder:
    """Load the encoder that ``resolve_encoder`` found."""
    if isinstance(spec, RemoteSpec):
        from whiten_index.encoding.remote import RemoteEncoder

        return RemoteEncoder(spec, config)
    assert folder is not None, "a model of this machine has a folder"
    if config.onnx:
        from whiten_index.encoding.onnx_runtime import OnnxEncoder

        return OnnxEncoder(spec, folder, config)
    if folder.not_run:
        from whiten_index.encoding.fallback import FallbackEncoder

        return FallbackEncoder(spec, folder, config)
    if folder.static:
        from whiten_index.encoding.static import StaticEncoder

        return StaticEncoder(spec, folder, config)
    from whiten_index.encoding.encoder import Encoder

    return Encoder(spec, folder, config)
