"""Load a model's tokenizer, with or without the model."""

from __future__ import annotations

import os
from typing import Any

from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.errors import EncoderError


def load_tokenizer(spec: EncoderSpec, folder: ModelFolder) -> Any:
    """Return a model's transformers tokenizer, fast where it has one.

    Raises:
        EncoderError: it cannot be loaded.
    """
    import transformers

    # Loading prints reports of its own, which belong to no caller of this library.
    transformers.utils.logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder.path,
            trust_remote_code=folder.trust_remote_code,
            local_files_only=folder.local_files_only,
            **code_pin(folder),
        )
    except Exception as error:
        raise cannot_load(f"the tokenizer of {spec.model}", error) from error


def code_pin(folder: ModelFolder) -> dict[str, str]:
    """Return the option of transformers that pins code from another repository."""
    return {} if folder.code_revision is None else {"code_revision": folder.code_revision}


def cannot_load(what: str, error: Exception) -> EncoderError:
    """Return what to raise: transformers raises what its loaders raise, all meaning the same."""
    return EncoderError(
        f"{what} cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0][:160]}); "
        "check the folder, or --trust-remote-code if the model comes with code you trust"
    )
