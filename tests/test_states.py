"""All pooled layers of a text against the model's own hidden states, pooled by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from whiten_index.encoding import EncoderConfig, StateEncoder, transformer
from whiten_index.errors import ConfigError
from whiten_index.evaluate.states import PooledStates
from whiten_index.progress import Silent, Stages

LONGEST = 32


def by_hand(folder: Path, text: str) -> np.ndarray:
    """Return (P, S, d) of one text alone, so without padding: mean and CLS of every state."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
    with torch.inference_mode():
        states = model(**inputs, output_hidden_states=True).hidden_states
    return np.stack(
        [[state[0].mean(0).numpy() for state in states], [state[0, 0].numpy() for state in states]]
    )


@pytest.fixture(scope="module")
def truth(tiny_model, texts) -> np.ndarray:
    return np.stack([by_hand(tiny_model, text) for text in texts])


def pooled(tiny_model: Path, texts: list[str], folder: Path, **options) -> PooledStates:
    config = EncoderConfig(model=str(tiny_model), max_length=LONGEST)
    return PooledStates.of(texts, config, folder, Stages(Silent()), **options)


@pytest.mark.parametrize("packs", [True, False])
def test_texts_together_equal_texts_alone(tiny_model, texts, truth, packs, monkeypatch):
    monkeypatch.setattr(transformer, "can_pack", lambda *_: packs)
    encoder = StateEncoder.load(str(tiny_model), poolings=("mean", "cls"), max_length=LONGEST)
    found = encoder.encode(texts).reshape(truth.shape)
    np.testing.assert_allclose(found, truth, atol=2e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("layers", [(0,), (1,), (-1,), (1, 2), (0, -1), (0, 1, 2)])
def test_any_layers_are_the_mean_of_their_states(
    tiny_model, texts, truth, tmp_path, pooling, layers
):
    states = pooled(tiny_model, texts, tmp_path)
    found = states.embedder(pooling=pooling, layers=layers).embed(texts[5:] + texts[:2])
    own = truth[:, ("mean", "cls").index(pooling)][:, [layer % 3 for layer in layers]].mean(1)
    np.testing.assert_allclose(found, np.concatenate([own[5:], own[:2]]), atol=2e-6)


def test_each_distinct_text_is_encoded_once(tiny_model, texts, tmp_path):
    states = pooled(tiny_model, [*texts, *texts[::-1]], tmp_path)
    assert states.values.shape == (len(set(texts)), 2, 3, 32)


def test_a_second_run_finds_the_states_and_a_damaged_file_is_made_again(
    tiny_model, texts, tmp_path
):
    stages = Stages(Silent())
    config = EncoderConfig(model=str(tiny_model), max_length=LONGEST)
    first = PooledStates.of(texts, config, tmp_path, stages)
    kept = np.array(first.values)
    again = Stages(Silent())
    PooledStates.of(texts, config, tmp_path, again)
    assert "encode" in stages.seconds
    assert "encode" not in again.seconds
    (file,) = tmp_path.glob("*/states.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 0xFF
    file.write_bytes(bytes(data))
    mended = Stages(Silent())
    found = PooledStates.of(texts, config, tmp_path, mended)
    assert "encode" in mended.seconds
    np.testing.assert_array_equal(np.array(found.values), kept)


@pytest.mark.parametrize("layer", [3, -4, 12])
def test_a_layer_that_is_not_there(tiny_model, texts, tmp_path, layer):
    states = pooled(tiny_model, texts[:3], tmp_path)
    with pytest.raises(ConfigError, match=rf"layer {layer} does not exist: .* 0 .* to 2"):
        states.embedder(pooling="mean", layers=(1, layer))
