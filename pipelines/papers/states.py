"""Pooled states of all layers, kept in a folder: every row of a model uses them again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from whiten_index.artifacts.atomic import remove_path
from whiten_index.artifacts.manifest import (
    Described,
    Schema,
    check_files,
    fingerprint,
    new_artifact,
    read_manifest,
)
from whiten_index.encoding.encoder import StateEncoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import resolve_encoder, states_spec
from whiten_index.errors import ArtifactError
from whiten_index.measure.evaluate_layers import LayerStates, create_array, fill_states
from whiten_index.progress import Stages
from whiten_index.store.records import TransformerFacts

POOLINGS = ("mean", "cls")
_KIND, _VERSION, _FILE = "pooled states", 1, "states.npy"


class _States(Described):
    """Manifest of pooled states."""

    encoder: TransformerFacts


_SCHEMA = Schema(_KIND, _VERSION, _States)


def kept_states(
    texts: Sequence[str], config: EncoderConfig, folder: Path, stages: Stages
) -> dict[str, LayerStates]:
    """Return the states of texts by pooling, encoded unless an earlier run left them in ``folder``.

    They take 8·S·d bytes for each distinct text of S states of d numbers.

    Raises:
        EncoderError: the model cannot be found or used.
        StorageError: the folder cannot be written, or the disk is full.
    """
    distinct = list(dict.fromkeys(texts))
    resolved, model = resolve_encoder(config)
    spec = states_spec(resolved, model, POOLINGS)
    final = folder / f"states-{fingerprint({'encoder': spec.fingerprint, 'texts': distinct})}"
    if not _is_whole(final):
        remove_path(final)
        with new_artifact(final) as (temporary, fields):
            shape = (len(distinct), len(POOLINGS), model.layers + 1, model.hidden_size)
            values = create_array(temporary / _FILE, shape)
            encoder = StateEncoder(resolved, model, config, poolings=POOLINGS)
            fill_states(encoder, distinct, values, stages)
            values.flush()  # type: ignore[attr-defined]
            fields |= {"kind": _KIND, "format_version": _VERSION, "encoder": spec.to_json()}
    values = np.load(final / _FILE, mmap_mode="r")
    rows = {text: row for row, text in enumerate(distinct)}
    return {
        pooling: LayerStates(values[:, place], pooling, spec, rows)
        for place, pooling in enumerate(POOLINGS)
    }


def _is_whole(folder: Path) -> bool:
    try:
        fields = read_manifest(folder, _SCHEMA)
        check_files(folder, fields, content=True)
    except ArtifactError:
        return False
    return True
