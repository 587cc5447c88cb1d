"""Hidden states by hooks: the chosen ones, none above, the same as the model's own."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import transformers

from whiten_index.encoding.transformer import ChosenLayers

COMMON = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "bert": (transformers.BertConfig, {"intermediate_size": 48}),
    "mpnet": (transformers.MPNetConfig, {"intermediate_size": 48}),
    "modernbert": (
        transformers.ModernBertConfig,
        {"intermediate_size": 48, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    ),
    # Its layers share their weights: there is no list of three to hook into.
    "albert": (transformers.AlbertConfig, {"intermediate_size": 48, "embedding_size": 16}),
}
CHOICES = [(0,), (1,), (2,), (3,), (0, 3), (1, 2), (0, 1, 2, 3)]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    kind, options = CONFIGS[request.param]
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(kind(**COMMON, **options)).eval()
    made.family = request.param
    return made


def batch(seed: int = 0, rows: int = 3) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (rows, 9), generator=random)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])[:rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


def truth(model, inputs, layers) -> np.ndarray:
    with torch.inference_mode():
        states = model(**inputs, output_hidden_states=True).hidden_states
    return torch.stack([states[layer] for layer in layers]).mean(dim=0).numpy()


@pytest.mark.parametrize("layers", CHOICES)
def test_chosen_layers_are_those_of_the_model(model, layers):
    chosen = ChosenLayers(model, layers, 3)
    real = batch()["attention_mask"].bool().numpy()
    with torch.inference_mode():
        found = chosen(**batch()).numpy()
    np.testing.assert_allclose(found[real], truth(model, batch(), layers)[real], atol=1e-5)
    assert chosen.by_hooks is (model.family != "albert" or layers == (3,))


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 2)])
def test_no_layer_above_the_highest_is_run(layers):
    kind, options = CONFIGS["bert"]
    model = transformers.AutoModel.from_config(kind(**COMMON, **options)).eval()
    chosen = ChosenLayers(model, layers, 3)
    ran = []
    for number, layer in enumerate(model.encoder.layer, start=1):
        layer.attention.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    with torch.inference_mode():
        chosen(**batch())
    assert ran == list(range(1, max(layers) + 1))


def test_threads_do_not_see_each_others_states():
    kind, options = CONFIGS["bert"]
    model = transformers.AutoModel.from_config(kind(**COMMON, **options)).eval()
    chosen = ChosenLayers(model, (0, 2), 3)
    expected = [truth(model, batch(seed), (0, 2)) for seed in range(8)]
    wrong = []

    def encode(seed: int) -> None:
        with torch.inference_mode():
            for _ in range(20):
                found = chosen(**batch(seed)).numpy()
                if not np.allclose(found, expected[seed], atol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=encode, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
