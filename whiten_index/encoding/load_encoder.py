"""Find a model and load its encoder: one of this machine, or one behind an API.

Importing this loads no torch.
"""

from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import RemoteSpec, Spec, local_model
from whiten_index.encoding.window_encoder import WindowEncoder


def resolve_encoder(config: EncoderConfig) -> tuple[Spec, ModelFolder | None]:
    """Find the model and settle every choice, without loading it; see ``local_model``.

    A model behind an API is asked for its canary, and has no folder.
    """
    if config.remote:
        from whiten_index.encoding.endpoint import ask_spec

        return ask_spec(config), None
    return local_model(config, by="this")


def make_encoder(spec: Spec, folder: ModelFolder | None, config: EncoderConfig) -> WindowEncoder:
    """Load the encoder that ``resolve_encoder`` found."""
    if isinstance(spec, RemoteSpec):
        from whiten_index.encoding.remote import RemoteEncoder

        return RemoteEncoder(spec, config)
    from whiten_index.encoding.encoder import Encoder

    assert folder is not None, "a model of this machine has a folder"
    return Encoder(spec, folder, config)
