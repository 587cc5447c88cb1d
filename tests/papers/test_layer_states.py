"""All pooled layers of a text against the model's own hidden states, pooled by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pipelines.papers.states import LayerStates, StateEncoder, kept_states
from whiten_index import Encoder
from whiten_index.encoding import transformer
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import resolve_encoder
from whiten_index.errors import ConfigError
from whiten_index.progress import Progress, Stages

LONGEST = 32
POOLINGS = ("mean", "cls")


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


@pytest.fixture(scope="module", params=POOLINGS)
def states(request, tiny_model, texts, tmp_path_factory) -> LayerStates:
    config = EncoderConfig(model=str(tiny_model), max_length=LONGEST)
    folder = tmp_path_factory.mktemp("states")
    return kept_states([*texts, *texts[::-1]], config, folder, Stages(Progress()))[request.param]


def load(folder: Path, poolings: tuple[str, ...]) -> StateEncoder:
    config = EncoderConfig(model=str(folder), max_length=LONGEST)
    return StateEncoder(*resolve_encoder(config), config, poolings)


@pytest.mark.parametrize("packs", [True, False])
def test_texts_together_equal_texts_alone(tiny_model, texts, truth, packs, monkeypatch):
    monkeypatch.setattr(transformer, "packing_obstacle", lambda *_: None if packs else "padded")
    encoder = load(tiny_model, POOLINGS)
    found = encoder.encode(texts).reshape(truth.shape)
    np.testing.assert_allclose(found, truth, atol=2e-6)


def test_padding_was_there(tiny_model, texts, monkeypatch):
    """The test above would be void if each batch held texts of one length only."""
    monkeypatch.setattr(transformer, "packing_obstacle", lambda *_: "padded")
    encoder = load(tiny_model, ("mean",))
    encoded = encoder.encode_window(texts)
    assert encoded.padded_tokens > encoded.tokens


@pytest.mark.parametrize("layers", [(0,), (1,), (-1,), (1, 2), (0, -1), (0, 1, 2)])
def test_any_layers_are_the_mean_of_their_states(states, texts, truth, layers):
    assert states.values.shape == (len(set(texts)), 3, 32)
    found = states.embedder(layers).embed(texts[5:] + texts[:2])
    own = truth[:, POOLINGS.index(states.pooling)][:, [layer % 3 for layer in layers]].mean(1)
    np.testing.assert_allclose(found, np.concatenate([own[5:], own[:2]]), atol=2e-6)


def test_the_last_state_is_what_the_encoder_gives(states, tiny_model, texts):
    encoder = Encoder.load(str(tiny_model), pooling=states.pooling, max_length=LONGEST)
    found = states.embedder((-1,)).embed(texts)
    np.testing.assert_allclose(found, encoder.encode(texts), atol=2e-6)


@pytest.mark.parametrize("layer", [3, -4, 12])
def test_a_layer_that_is_not_there(states, layer):
    with pytest.raises(ConfigError, match=rf"layer {layer} does not exist: .* 0 .* to 2"):
        states.embedder((1, layer))
