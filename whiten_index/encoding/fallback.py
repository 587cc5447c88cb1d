"""Models that sentence-transformers runs: folders with modules or settings that are not run here.

The folder names classes that sentence-transformers imports and calls, so this needs the consent
that code needs.
"""

import functools
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from whiten_index.artifacts.files import unforeseen
from whiten_index.encoding.batching import BatchEncoder
from whiten_index.encoding.encoder_config import EncoderConfig, chosen_devices
from whiten_index.encoding.model_files import loading_model
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.transformer import require_finite, unmapped
from whiten_index.encoding.window_encoder import TextWindow
from whiten_index.errors import ConfigError, EncoderError, first_line, require_installed


class FallbackEncoder(BatchEncoder):
    """A model that sentence-transformers runs; its embeddings may depend on batches by rounding."""

    batch_tokens, longest_first = 64, True

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        super().__init__(spec, None)
        self._why = folder.not_run
        self._model = _loaded(folder, chosen_devices(config.device)[0])
        tokenizer = getattr(self._model, "tokenizer", None)
        self.truncation_side = getattr(tokenizer, "truncation_side", "right")

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of the libraries."""
        names = ("torch", "transformers", "tokenizers", "sentence-transformers")
        return {**{name: version(name) for name in names}, "inputs": "sentence-transformers"}

    @property
    def note(self) -> str | None:
        """Note that sentence-transformers runs the model, and why."""
        return f"note: sentence-transformers runs this model, since it {self._why}"

    def embed(self, window: TextWindow, rows: slice) -> NDArray[np.float32]:
        """Return the embeddings of some of the different texts, as one batch."""
        encode = self._model.encode_query if window.queries else self._model.encode_document
        texts, prompt = list(window.distinct[rows]), self.prompts[window.queries]
        try:
            found = encode(texts, prompt=prompt, batch_size=len(texts), show_progress_bar=False)
        except Exception as error:
            if unforeseen(error, step="encode") is not None:
                raise
            # Modules of others raise all sorts of errors.
            raise EncoderError(
                f"sentence-transformers cannot encode with {self.spec.model} "
                f"({type(error).__name__}: {first_line(error)}); choose another model"
            ) from error
        return np.asarray(found, dtype=np.float32)


def fallback_shape(folder: ModelFolder, config: EncoderConfig) -> tuple[int, int | None]:
    """Return width and token limit of a model that sentence-transformers runs; this loads it.

    Raises:
        ConfigError: an option is for models that are run here.
        EncoderError: sentence-transformers cannot load the model.
    """
    plain = EncoderConfig(model=config.model)
    names = ("pooling", "layers", "max_length", "dtype", "backend")
    if given := [name for name in names if getattr(config, name) != getattr(plain, name)]:
        raise ConfigError(
            f"sentence-transformers runs {folder.name}, and takes no "
            f"{' or '.join('--' + name.replace('_', '-') for name in given)}; leave it out"
        )
    model = _loaded(folder, chosen_devices(config.device)[0])
    with loading_model(f"model {folder.name}", folder.root):
        # Some modules do not say their width.
        width = np.shape(model.encode(["a"], show_progress_bar=False))[1]
        return int(width), model.get_max_seq_length()


def _loaded(folder: ModelFolder, device: str) -> Any:
    files = folder.weights_sha256, folder.files_sha256
    model = _load(folder.root, files, device, folder.code_revision, folder.local_files_only)
    try:
        folder.require_unchanged()
    except EncoderError:
        _load.cache_clear()
        raise
    return model


@functools.lru_cache(maxsize=2)
def _load(
    root: Path, _files: tuple[str, str], device: str, code_revision: str | None, local: bool
) -> Any:
    require_installed("sentence_transformers", by=f"model {root}", extra="sentence-transformers")
    from sentence_transformers import SentenceTransformer

    transformers.utils.logging.disable_progress_bar()
    pin = {} if code_revision is None else {"code_revision": code_revision}
    with loading_model(f"model {root}", root):
        model: Any = SentenceTransformer(
            str(root),
            device=None if device == "auto" else device,
            trust_remote_code=True,
            local_files_only=local,
            model_kwargs=pin,
            config_kwargs=pin,
        ).eval()
    # Embeddings are kept as they are before the normalisation.
    while len(model) > 1 and type(model[-1]).__name__ == "Normalize":
        del model[len(model) - 1]
    require_finite(str(root), model)
    return unmapped(model)
