"""All pooled layers of a text against the model's own hidden states, pooled by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from whiten_index.encoding import EncoderConfig, StateEncoder, transformer
from whiten_index.errors import ConfigError, EncoderError
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


def test_padding_was_there(tiny_model, texts, monkeypatch):
    """The test above would be void if each batch held texts of one length only."""
    monkeypatch.setattr(transformer, "can_pack", lambda *_: False)
    encoder = StateEncoder.load(str(tiny_model), max_length=LONGEST)
    encoded = encoder.encode_window(texts)
    assert encoded.padded_tokens > encoded.tokens


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("layers", [(0,), (1,), (-1,), (1, 2), (0, -1), (0, 1, 2)])
def test_any_layers_are_the_mean_of_their_states(
    tiny_model, texts, truth, tmp_path, pooling, layers
):
    states = pooled(tiny_model, texts, tmp_path)
    found = states.embedder(pooling=pooling, layers=layers).embed(texts[5:] + texts[:2])
    own = truth[:, ("mean", "cls").index(pooling)][:, [layer % 3 for layer in layers]].mean(1)
    np.testing.assert_allclose(found, np.concatenate([own[5:], own[:2]]), atol=2e-6)


def test_the_last_state_is_what_the_encoder_gives(tiny_model, texts, tmp_path):
    from whiten_index import Encoder

    states = pooled(tiny_model, texts, tmp_path)
    encoder = Encoder.load(str(tiny_model), pooling="mean", max_length=LONGEST)
    found = states.embedder(pooling="mean", layers=(-1,)).embed(texts)
    np.testing.assert_allclose(found, encoder.encode(texts), atol=2e-6)


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


def test_other_lengths_have_states_of_their_own(tiny_model, texts, tmp_path):
    pooled(tiny_model, texts, tmp_path)
    config = EncoderConfig(model=str(tiny_model), max_length=8)
    PooledStates.of(texts, config, tmp_path, Stages(Silent()))
    assert len(list(tmp_path.glob("states-*"))) == 2


@pytest.mark.parametrize("layer", [3, -4, 12])
def test_a_layer_that_is_not_there(tiny_model, texts, tmp_path, layer):
    states = pooled(tiny_model, texts[:3], tmp_path)
    with pytest.raises(ConfigError, match=rf"layer {layer} does not exist: .* 0 .* to 2"):
        states.embedder(pooling="mean", layers=(1, layer))


def test_poolings_that_cannot_be(tiny_model, texts, tmp_path):
    for poolings in (("mean", "mean"), (), ("median",)):
        with pytest.raises(ConfigError, match="cannot be used together"):
            pooled(tiny_model, texts[:3], tmp_path, poolings=poolings)
    states = pooled(tiny_model, texts[:3], tmp_path, poolings=("cls",))
    with pytest.raises(ConfigError, match="'mean' was not kept; use one of cls"):
        states.embedder(pooling="mean", layers=(0,))


def test_a_model_that_is_not_there(texts, tmp_path):
    with pytest.raises(EncoderError, match="no-such/model"):
        PooledStates.of(texts, EncoderConfig(model="no-such/model"), tmp_path, Stages(Silent()))
    assert not list(tmp_path.iterdir())
