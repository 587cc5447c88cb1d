"""Encoders that a manifest names: loaded only as far as the person who opens it allows.

A manifest says which model it needs, and whether that model runs Python code of its own. It gives
no permission: code runs only with ``trust_remote_code``, and a hub is asked only for a model that
the opener names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whiten_index.encoding.models import EMBEDDED
from whiten_index.encoding.spec import EncoderConfig, EncoderSpec
from whiten_index.errors import EncoderError

_COMMIT = re.compile(r"[0-9a-f]{40}")


def recorded_spec(encoder: Mapping[str, Any]) -> EncoderSpec | None:
    """Return the encoder of queries that a manifest names, None where it names none."""
    if encoder["kind"] == "transformer":
        return EncoderSpec.from_json(dict(encoder))
    query = encoder.get("query_encoder")
    return None if query is None else EncoderSpec.from_json(query)


def recorded_config(
    spec: EncoderSpec,
    *,
    model: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    threads: int | None = None,
) -> EncoderConfig:
    """Return the configuration that loads a recorded encoder.

    Args:
        spec: the encoder as a manifest names it.
        model: the opener's own name for the model, which may be fetched; None takes the recorded
            one, from this machine only.
        trust_remote_code: the opener's permission to run the model's own code.
        device: see ``EncoderConfig``.
        threads: see ``EncoderConfig``.

    Raises:
        EncoderError: the model needs code that the opener does not allow, or the manifest names it
            by something other than an absolute folder or a commit on the hub.
    """
    called = f"{spec.model!r}" + (f" at revision {spec.revision!r}" if spec.revision else "")
    if spec.needs_code and not trust_remote_code:
        raise EncoderError(
            f"the encoder {called} runs Python code that comes with the model; if you trust that "
            "code, allow it with --trust-remote-code (in Python trust_remote_code=True, in a job "
            "file trust-remote-code = true)"
        )
    fixed = _COMMIT.fullmatch(spec.revision or "") is not None
    # Any other name means what happens to lie in the current folder or the hub's cache.
    if model is None and not (
        fixed or spec.revision == EMBEDDED or (not spec.revision and Path(spec.model).is_absolute())
    ):
        raise EncoderError(
            f"the manifest names the encoder {called}, which is neither an absolute folder nor a "
            "commit on the hub; name the model yourself with --model (in Python model=)"
        )
    # What was built with one commit of a model is searched with that one, whoever fetches it.
    keeps = model is None or (model == spec.model and fixed)
    return EncoderConfig(
        model=spec.model if model is None else model,
        revision=spec.revision if keeps else None,
        pooling=spec.pooling,
        layers=spec.layers,
        max_length=spec.max_length,
        dtype=spec.dtype,
        device=device,
        threads=threads,
        document_prompt=spec.document_prompt,
        query_prompt=spec.query_prompt,
        trust_remote_code=spec.needs_code,
        local_files_only=model is None,
        code_revision=spec.code_revision,
    )
