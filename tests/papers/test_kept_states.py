"""States of all layers, kept for later runs of the papers' rows."""

from __future__ import annotations

import numpy as np

from pipelines.papers.states import kept_states
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.progress import Progress, Stages


def test_a_second_run_finds_the_states_and_a_damaged_file_is_made_again(
    tiny_model, texts, tmp_path
):
    config = EncoderConfig(model=str(tiny_model), max_length=32)
    first, again, mended = (Stages(Progress()) for _ in range(3))
    kept = np.array(kept_states(texts, config, tmp_path, first)["cls"].values)
    kept_states(texts, config, tmp_path, again)
    assert "encode" in first.seconds
    assert "encode" not in again.seconds
    (file,) = tmp_path.glob("*/states.npy")
    data = bytearray(file.read_bytes())
    data[-5] ^= 0xFF
    file.write_bytes(bytes(data))
    found = kept_states(texts, config, tmp_path, mended)
    assert "encode" in mended.seconds
    np.testing.assert_array_equal(np.array(found["cls"].values), kept)


def test_other_lengths_have_other_states(tiny_model, texts, tmp_path):
    for length in (32, 8):
        config = EncoderConfig(model=str(tiny_model), max_length=length)
        kept_states(texts, config, tmp_path, Stages(Progress()))
    assert len(list(tmp_path.glob("states-*"))) == 2
