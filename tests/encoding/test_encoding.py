"""The encoder: its embeddings against naive loops, transformers and sentence-transformers."""

import importlib

import numpy as np
import pytest
import torch
import transformers

from tests.helpers.code_models import edit_json
from tests.helpers.tiny_models import copied, load
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import load_encoder, resolve_encoder
from whiten_index.encoding.models import find_model

LONGEST, CONFIG = 32, "config_sentence_transformers.json"


def naive_pool(tokens: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pool the (t, d) states of one text that has no padding."""
    if pooling == "mean":
        return sum(tokens) / len(tokens)
    if pooling == "max":
        return torch.stack([max(column) for column in tokens.T])
    if pooling == "weightedmean":
        return sum(i * token for i, token in enumerate(tokens, 1)) / sum(range(1, len(tokens) + 1))
    if pooling == "mean_sqrt_len_tokens":
        return sum(tokens) / len(tokens) ** 0.5
    return tokens[0 if pooling == "cls" else -1]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last", "first-last-avg"])
def test_an_embedding_does_not_depend_on_its_company(tiny_model, texts, pooling):
    encoder = load(tiny_model, pooling=pooling, threads=1)
    together = encoder.encode(texts)
    assert together.shape == (len(texts), encoder.dim)
    assert together.dtype == np.float32
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    # What is encoded again some night later is the same to the bit.
    np.testing.assert_array_equal(alone, together)
    order = np.random.default_rng(1).permutation(len(texts))
    shuffled = encoder.encode([texts[i] for i in order])
    np.testing.assert_array_equal(shuffled, together[order])


@pytest.mark.parametrize("side", ["right", "left"])
def test_of_a_query_a_bounded_part_is_read(tiny_model, tmp_path, side):
    """A text of one endless word has few tokens, and would be read to its end for them."""
    folder = copied(tiny_model, tmp_path / "copy")
    edit_json(folder / "tokenizer_config.json", truncation_side=side)
    encoder = load(folder, max_length=8)
    part = "x" * (8 * 64)
    whole = f"{part} cat" if side == "right" else f"cat {part}"
    found = encoder.encode_queries([whole, part])
    np.testing.assert_array_equal(found[0], found[1])
    documents = encoder.encode([whole, part])
    assert np.abs(documents[0] - documents[1]).max() > 1e-3
    assert encoder.count_tokens([whole]) == encoder.count_tokens([part])
    for some in (["the cat sat", "a", part], ["a", "a", "the cat sat"], ["a", part, whole]):
        alone = sum(encoder.count_tokens([text]) for text in some)
        assert encoder.count_tokens(some) == alone


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, (2,)),
        ({"layers": (0,)}, (0,)),
        ({"layers": (0, -1)}, (0, 2)),
        ({"layers": (-2,)}, (1,)),
        ({"layers": (0, 1, 2), "pooling": "max"}, (0, 1, 2)),
        ({"pooling": "first-last-avg"}, (1, 2)),
        ({"pooling": "cls", "layers": (1,)}, (1,)),
        ({"pooling": "last"}, (2,)),
    ],
)
def test_layers_and_pooling_agree_with_the_hidden_states(tiny_model, texts, options, layers):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    model = transformers.AutoModel.from_pretrained(tiny_model).eval()
    name = options.get("pooling", "mean")
    pooling = "mean" if name == "first-last-avg" else name
    expected = []
    for text in texts[:12]:
        tokens = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
        with torch.no_grad():
            states = model(**tokens, output_hidden_states=True).hidden_states
        chosen = sum(states[layer][0] for layer in layers) / len(layers)
        expected.append(naive_pool(chosen, pooling).numpy())
    found = load(tiny_model, **options).encode(texts[:12])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def sentence_transformers():
    return importlib.import_module("sentence_transformers")


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "lasttoken"])
def test_a_folder_that_sentence_transformers_saved_encodes_alike(
    tmp_path, tiny_model, texts, sentence_transformers, mode
):
    transformer, pooling = sentence_transformers.SentenceTransformer(str(tiny_model), device="cpu")
    transformer.max_seq_length = 14
    truth = sentence_transformers.SentenceTransformer(
        modules=[transformer, type(pooling)(32, pooling_mode=mode)], device="cpu",
        prompts={"query": "the king: ", "document": "the queen: "},
    )  # fmt: skip
    truth.save(str(tmp_path / "saved"))
    found = load(tmp_path / "saved")
    some = texts[:20]
    np.testing.assert_allclose(
        found.encode(some), truth.encode(some, prompt_name="document"), atol=1e-5
    )
    np.testing.assert_allclose(
        found.encode_queries(some), truth.encode(some, prompt_name="query"), atol=1e-5
    )


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("tokenizer_config.json", {"model_max_length": 5}),
        ("sentence_roberta_config.json", {"max_seq_length": 8}),
        (CONFIG, {"prompts": {"query": "", "document": "", "x": "a "}, "default_prompt_name": "x"}),
        (CONFIG, {"prompts": {"document": "", "passage": "king "}}),
    ],
)
def test_settings_count_as_in_sentence_transformers(
    tmp_path, tiny_model, texts, sentence_transformers, file, settings
):
    transformer, pooling = sentence_transformers.SentenceTransformer(str(tiny_model), device="cpu")
    transformer.max_seq_length = 14
    folder = tmp_path / "saved"
    sentence_transformers.SentenceTransformer(modules=[transformer, pooling]).save(str(folder))
    if file.startswith("sentence_"):
        (folder / "sentence_bert_config.json").rename(folder / file)
    edit_json(folder / file, **settings)
    truth = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    found, some = load(folder), texts[:20]
    np.testing.assert_allclose(found.encode(some), truth.encode_document(some), atol=1e-5)
    np.testing.assert_allclose(found.encode_queries(some), truth.encode_query(some), atol=1e-5)


SENTENCES = [
    "The cat sat on the mat.",
    "A feline was resting on a rug!",
    "Whitening makes the covariance of sentence embeddings the identity.",
    "Größe, café, naïve — 東京 and Москва 🙂",
    "x",
    "HTTP 404: not found (see https://example.org/a?b=c)",
    "one two three " * 200,
    "",
]


def test_the_embedded_minilm_agrees_with_sentence_transformers(sentence_transformers):
    encoder = load_encoder(device="cpu")
    assert encoder.spec.revision == "embedded"
    assert encoder.spec.normalizes
    assert (encoder.dim, encoder.spec.max_length) == (384, 256)
    assert resolve_encoder(EncoderConfig(pooling="first-last-avg"))[0].layers == (1, 6)
    folder = find_model("sentence-transformers/all-MiniLM-L6-v2").path
    truth = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    found = encoder.encode(SENTENCES)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() > 0.1
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, truth.encode(SENTENCES, normalize_embeddings=True), atol=1e-5)
