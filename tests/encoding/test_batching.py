"""Tokens, windows, budgets and threads: every text once, in its place, whatever the batches."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tiny_models import FAMILIES, load
from whiten_index.encoding import tokenization
from whiten_index.encoding.encoder import Encoder, InferenceThreads
from whiten_index.encoding.models import find_model
from whiten_index.encoding.tokenization import tokenize
from whiten_index.errors import StorageError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def texts(tiny_words) -> list[str]:
    """300 texts of 1 to 60 words, a fifth of them twice or more."""
    rng = np.random.default_rng(0)
    some = [" ".join(rng.choice(tiny_words, size=n)) for n in rng.integers(1, 61, 240)]
    return [some[i] for i in rng.permutation(np.r_[np.arange(240), rng.integers(0, 240, 60)])]


def row(window, i: int) -> list[int]:
    place = window.places[i]
    return window.ids[window.offsets[place] : window.offsets[place + 1]].tolist()


@pytest.fixture(scope="module")
def one_by_one(tiny_model, texts) -> np.ndarray:
    plain = load(tiny_model)
    return np.concatenate([plain.encode([text]) for text in texts])


@pytest.mark.parametrize("budget", [37, 10**6])
@pytest.mark.parametrize("threads", [1, 3])
def test_embeddings_do_not_depend_on_batches_or_threads(
    tiny_model, texts, one_by_one, budget, threads
):
    torch_threads = torch.get_num_threads()
    try:
        encoder = load(tiny_model, threads=threads)
        encoder.batch_tokens = budget
        done = []
        encoded = encoder.collect(encoder.run(encoder.prepare(texts), advance=done.append))
        np.testing.assert_allclose(encoded.embeddings, one_by_one, atol=1e-5)
        assert sum(done) == len(texts)
        assert encoded.distinct == len(set(texts))
        assert encoded.padded_tokens >= encoded.tokens
    finally:
        torch.set_num_threads(torch_threads)


@pytest.fixture(params=["of one length", "padded"])
def way(request, monkeypatch) -> str:
    """How texts share a batch: those of one length, as on a CPU, or of 0.8 to 1 of the longest."""
    if request.param == "padded":
        monkeypatch.setattr(Encoder, "shortest", property(lambda _: 0.8, lambda *_: None))
    return request.param


def starve(monkeypatch, *, most: int, error: type[Exception] | str) -> None:
    """Let batches of more than ``most`` tokens fail as if there were no memory."""
    forward = Encoder.padded

    def call(self, ids, *others, **options):
        if ids.numel() > most:
            raise (
                torch.OutOfMemoryError("CUDA out of memory")
                if error == "cuda"
                else RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"
                )
            )
        return forward(self, ids, *others, **options)

    monkeypatch.setattr(Encoder, "padded", call)


@pytest.mark.parametrize("error", ["cuda", "cpu"])
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_runs_out_halves_the_budget_and_loses_nothing(
    tiny_model, texts, one_by_one, monkeypatch, error, threads, way
):
    encoder = load(tiny_model, threads=threads)
    starve(monkeypatch, most=300, error=error)
    ran = encoder.run(encoder.prepare(texts))
    np.testing.assert_allclose(encoder.collect(ran).embeddings, one_by_one, atol=1e-5)
    assert ran.out_of_memory >= 1
    assert encoder.batch_tokens <= 300


def test_a_single_text_that_does_not_fit_is_an_error(tiny_model, texts, monkeypatch, way):
    encoder = load(tiny_model)
    starve(monkeypatch, most=20, error="cuda")
    with pytest.raises(StorageError, match=r"one text of \d+ tokens does not fit .*--max-length"):
        encoder.encode(texts)


def test_what_a_step_or_the_caller_raises_stops_the_threads():
    threads = InferenceThreads(CPU, 2)
    steps = []

    def failing():
        steps.append(1)
        if len(steps) == 5:
            raise ValueError("broken")
        return 1

    with pytest.raises(ValueError, match="broken"):
        threads.run(failing, lambda rows: None)
    with pytest.raises(KeyboardInterrupt):
        threads.run(lambda: 1, Mock(side_effect=KeyboardInterrupt))
    taken = iter([1, 1])
    heard = []
    threads.run(lambda: next(taken, None), heard.append)
    assert heard == [1, 1]


@pytest.fixture(scope="module", params=["bert", "xlm-roberta", "qwen3", "minilm"])
def tokenizer(request, tmp_path_factory):
    if request.param == "minilm":
        folder = find_model("all-MiniLM-L6-v2").path
    else:
        folder = FAMILIES[request.param](tmp_path_factory.mktemp("tokenizer") / request.param)
    return transformers.AutoTokenizer.from_pretrained(folder)


BLANKS = (" ", "  ", "\n", "\t", "\r\n", " " * 90, "\u00a0", "\u3000", "\x1c", "\u200b", "\u00ad")
WORDS = ("the", "king's", "x" * 101, "ab" * 49, "[SEP]", "[SE", "P]", "[MASK] ", "##s", "e.g.")
OTHERS = ("日本語。", "İ", "Σ", "ß", "e\u0301", "\u0301", "\ufffd", "\x00", "🎉", "한국", "が")
FRAGMENTS = st.one_of(st.sampled_from([*BLANKS, *WORDS, *OTHERS]), st.text(max_size=12))
LONG = st.tuples(st.lists(FRAGMENTS, max_size=40), st.integers(1, 9)).map(
    lambda made: "".join(made[0]) * made[1]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(LONG, min_size=1, max_size=4), st.integers(3, 9), st.sampled_from([1, 3, 8, 64]))
def test_the_tokens_kept_are_those_of_the_whole_text(tokenizer, texts, max_length, letters):
    whole = [tokenizer(text, truncation=False, verbose=False)["input_ids"] for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "_CHARACTERS_A_TOKEN", letters)
        window = tokenize(tokenizer, texts, max_length=max_length)
    assert window.truncated.tolist() == [len(ids) > max_length for ids in whole]
    for i, ids in enumerate(whole):
        assert row(window, i) == (
            ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]
        )
