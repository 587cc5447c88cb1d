"""Tokens, windows, budgets and lanes: every text once, in its place, whatever the batches."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.encoding import (
    Encoder,
    EncoderConfig,
    batching,
    find_model,
    resolve_encoder,
    transformer,
)
from whiten_index.encoding.batching import tokenize
from whiten_index.encoding.budget import LADDERS, TokenBudget, remember, remembered
from whiten_index.encoding.lanes import Lanes
from whiten_index.encoding.transformer import Transformer
from whiten_index.errors import EncoderError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return transformers.AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def texts(tiny_words) -> list[str]:
    """300 texts of 1 to 60 words, a fifth of them twice or more."""
    rng = np.random.default_rng(0)
    some = [" ".join(rng.choice(tiny_words, size=n)) for n in rng.integers(1, 61, 240)]
    return [some[i] for i in rng.permutation(np.r_[np.arange(240), rng.integers(0, 240, 60)])]


def load(model: Path, **options) -> Encoder:
    return Encoder.load(str(model), device="cpu", **options)


def row(window, i: int) -> list[int]:
    place = window.places[i]
    return window.ids[window.offsets[place] : window.offsets[place + 1]].tolist()


# --------------------------------------------------------------------------- tokens


class _WithoutBackend:
    """A tokenizer as the slow ones are: to be called, with nothing inside to set."""

    pad_token_id = 0

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __call__(self, texts, **options):
        return self._tokenizer(texts, **options)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("max_length", [3, 10, 32])
def test_tokens_are_cut_and_the_cuts_told(tokenizer, texts, fast, max_length):
    whole = [tokenizer(text, truncation=False, verbose=False)["input_ids"] for text in texts]
    window = tokenize(
        tokenizer if fast else _WithoutBackend(tokenizer), texts, max_length=max_length
    )
    assert window.truncated.tolist() == [len(ids) > max_length for ids in whole]
    for i, ids in enumerate(whole):
        kept = ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]
        assert row(window, i) == kept


def test_a_tokenizer_that_cuts_on_the_left_keeps_the_end(tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model, truncation_side="left")
    window = tokenize(tokenizer, ["cat dog bird fish"], max_length=4)
    assert tokenizer.convert_ids_to_tokens(row(window, 0)) == ["[CLS]", "bird", "fish", "[SEP]"]


def test_different_texts_are_kept_once_and_longest_first(tokenizer, texts):
    window = tokenize(tokenizer, texts, max_length=32)
    assert len(window) == len(texts)
    assert len(window.lengths) == len(set(texts)) < len(texts)
    assert (np.diff(window.lengths) <= 0).all()
    for i, j in [(i, texts.index(text)) for i, text in enumerate(texts)]:
        assert window.places[i] == window.places[j]


def test_a_window_of_thousands_keeps_its_order(tokenizer, tiny_words):
    words = [f"{a} {b}" for a in tiny_words for b in tiny_words]
    window = tokenize(tokenizer, words, max_length=8)
    found = [tokenizer.decode(row(window, i)[1:-1]) for i in range(len(words))]
    assert found == words


def test_no_text_makes_an_empty_window(tokenizer):
    window = tokenize(tokenizer, [], max_length=8)
    assert (len(window), len(window.ids), len(window.lengths)) == (0, 0, 0)


# --------------------------------------------------------------------------- the same embeddings


@pytest.mark.parametrize("budget", [1, 37, 200, 10**6])
@pytest.mark.parametrize("threads", [1, 3])
def test_embeddings_do_not_depend_on_batches_or_threads(tiny_model, texts, budget, threads):
    torch_threads = torch.get_num_threads()
    try:
        plain = load(tiny_model, threads=1)
        expected = np.concatenate([plain.encode([text]) for text in texts])
        encoder = load(tiny_model, threads=threads)
        encoder.budget = TokenBudget([budget], known=budget)
        done = []
        encoded = encoder.encode_window(texts, advance=done.append)
        np.testing.assert_allclose(encoded.embeddings, expected, atol=1e-5)
        assert sum(done) == len(texts)
        assert encoded.distinct == len(set(texts))
        assert encoded.padded_tokens >= encoded.tokens
    finally:
        torch.set_num_threads(torch_threads)


@pytest.mark.parametrize("rows", [1, 7, 100, 1000])
def test_embeddings_do_not_depend_on_windows_or_chunks(tiny_model, texts, rows, monkeypatch):
    encoder = load(tiny_model)
    expected = encoder.encode(texts)
    monkeypatch.setattr(Encoder, "window_rows", rows)
    chunks = [texts[:3], texts[3:3], texts[3:250], texts[250:]]
    found = list(encoder.stream(iter(chunks)))
    assert all(len(block) == rows for block in found[:-1])
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)


def test_threads_of_the_caller_keep_their_cores(tiny_model, texts):
    before = torch.get_num_threads()
    load(tiny_model).encode(texts)
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *later] == [before, before]


@pytest.mark.parametrize(("fewest", "tokens"), [(None, [64, 96]), (0, [4, 96])])
def test_a_short_batch_is_filled_up_only_where_that_matters(
    tiny_model, monkeypatch, fewest, tokens
):
    encoder = load(tiny_model)
    model, seen = encoder._transformer, []
    if fewest is not None:
        model.fewest_rows = fewest
    packed = model.packed
    monkeypatch.setattr(
        model, "packed", lambda ids, *args, **kw: seen.append(len(ids)) or packed(ids, *args, **kw)
    )
    encoder.encode(["the cat"])
    encoder.encode(["the cat " * 15 + last for last in ("the", "cat", "a")])
    assert seen == tokens


@pytest.mark.parametrize(
    ("device", "packs", "fewest"), [("cpu", True, 64), ("cpu", False, 0), ("meta", True, 0)]
)
def test_a_batch_is_filled_up_on_a_cpu_without_padding(
    tiny_model, monkeypatch, device, packs, fewest
):
    """A device without memory stands for a GPU."""
    monkeypatch.setattr(transformer, "can_pack", lambda *_: packs)
    spec, folder = resolve_encoder(EncoderConfig(model=str(tiny_model)))
    assert Transformer(spec, folder, torch.device(device)).fewest_rows == fewest


# --------------------------------------------------------------------------- memory that runs out


@pytest.fixture(params=["packed", "padded"])
def way(request, monkeypatch) -> str:
    """How batches go through the model: end to end, or each text padded to the longest."""
    if request.param == "padded":
        monkeypatch.setattr(transformer, "can_pack", lambda *_: False)
    return request.param


def starve(encoder: Encoder, monkeypatch, *, most: int, error: type[Exception] | str) -> None:
    """Let batches of more than ``most`` tokens fail as if there were no memory."""
    way = "packed" if encoder._transformer.packs else "padded"
    forward = getattr(encoder._transformer.__class__, way)

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

    monkeypatch.setattr(encoder._transformer.__class__, way, call)


@pytest.mark.parametrize("error", ["cuda", "cpu"])
@pytest.mark.parametrize("known", [None, 4096])
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_runs_out_halves_the_budget_and_loses_nothing(
    tiny_model, texts, monkeypatch, error, known, threads, way
):
    expected = load(tiny_model).encode(texts)
    encoder = load(tiny_model, threads=threads)
    encoder.budget = TokenBudget(LADDERS["cpu"], known=known)
    starve(encoder, monkeypatch, most=300, error=error)
    found = encoder.encode_window(texts)
    np.testing.assert_allclose(found.embeddings, expected, atol=1e-5)
    assert encoder.budget.halvings >= 1
    if known:
        assert encoder.budget.chosen <= 300


def test_a_single_text_that_does_not_fit_is_an_error(tiny_model, texts, monkeypatch, way):
    encoder = load(tiny_model)
    assert encoder._transformer.packs == (way == "packed")
    starve(encoder, monkeypatch, most=20, error="cuda")
    with pytest.raises(EncoderError, match=r"one text of \d+ tokens does not fit .*--max-length"):
        encoder.encode(texts)


def test_other_errors_of_the_model_are_not_taken_for_memory(tiny_model, texts, monkeypatch, way):
    encoder = load(tiny_model)

    def broken(self, *others, **options):
        raise RuntimeError("a size does not match")

    monkeypatch.setattr(encoder._transformer.__class__, way, broken)
    with pytest.raises(RuntimeError, match="a size does not match"):
        encoder.encode(texts)


# --------------------------------------------------------------------------- the budget


def feed(budget: TokenBudget, rate, *, rounds: int = 4) -> None:
    for _ in range(rounds):
        for _ in range(3):
            asked = budget.ask()
            budget.tell(asked, tokens=asked, seconds=asked / rate(asked))


def test_the_fastest_budget_wins_and_the_smallest_of_equals():
    fastest = TokenBudget([100, 200, 400])
    feed(fastest, lambda asked: {100: 50.0, 200: 99.0, 400: 120.0}[asked])
    assert fastest.chosen == 400
    equal = TokenBudget([100, 200, 400])
    feed(equal, lambda asked: {100: 50.0, 200: 99.0, 400: 100.0}[asked])
    assert equal.chosen == 200


def test_one_slow_batch_does_not_decide():
    budget = TokenBudget([100, 200, 400])
    budget.tell(400, tokens=400, seconds=1000.0)
    feed(budget, lambda asked: float(asked), rounds=5)
    assert budget.chosen == 400


def test_a_budget_halved_while_it_is_sought_goes_on_below():
    budget = TokenBudget([100, 200, 400])
    budget.halve(400)
    feed(budget, lambda asked: float(asked), rounds=6)
    assert (budget.chosen, budget.halvings) == (200, 1)
    budget.halve(90)
    assert (budget.chosen, budget.halvings) == (45, 2)


def test_a_small_window_asks_for_rungs_that_it_can_fill():
    budget = TokenBudget([100, 200, 400])
    assert {budget.ask(250) for _ in range(6)} == {100, 200}
    assert budget.ask(30) == 30
    assert TokenBudget([100, 200], known=200).ask(120) == 120


def test_small_windows_settle_on_what_they_could_try_but_do_not_have_it_remembered():
    budget = TokenBudget([100, 200, 400])
    for _ in range(8):
        asked = budget.ask(250)
        budget.tell(asked, tokens=asked, seconds=1.0, most=250)
    assert (budget.chosen, budget.thorough) == (200, False)


def test_a_budget_found_while_memory_was_short_is_not_remembered(
    tiny_model, texts, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(LADDERS, "cpu", (64, 128, 256))
    encoder = load(tiny_model, threads=1)
    with monkeypatch.context() as starved:
        starve(encoder, starved, most=130, error="cuda")
        encoder.encode(texts * 3)
    assert encoder.budget.chosen is not None
    assert load(tiny_model, threads=1).budget.chosen is None


@pytest.mark.parametrize(
    ("threads", "lanes"), [(1, 1), (2, 2), (16, 16), (17, 16), (24, 12), (31, 15)]
)
def test_lanes_leave_few_cores_idle(threads, lanes):
    assert Lanes(CPU, threads).count == lanes


@given(st.lists(st.integers(1, 5000), max_size=20))
def test_a_halved_budget_never_reaches_zero(failures):
    budget = TokenBudget([100, 200, 400])
    for tokens in failures:
        budget.halve(tokens)
    assert budget.ask() >= 1


def test_a_budget_is_remembered_by_model_and_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = {"weights": "abc", "device": "cpu", "lanes": 2}
    assert remembered(facts) is None
    remember(facts, 2048)
    assert remembered(facts) == 2048
    assert remembered({**facts, "lanes": 4}) is None
    (kept,) = tmp_path.glob("whiten-index/token-budgets/*.json")
    for damaged in ("", "[]", "{}", json.dumps({"token_budget": -1})):
        kept.write_text(damaged)
        assert remembered(facts) is None


def test_a_budget_that_cannot_be_kept_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember({"weights": "abc"}, 2048)
    assert remembered({"weights": "abc"}) is None


def test_an_encoder_finds_its_budget_and_the_next_one_knows_it(
    tiny_model, tiny_words, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(LADDERS, "cpu", (64, 128, 256))
    first = load(tiny_model, threads=2)
    assert first.budget.chosen is None
    first.encode([f"{a} {b} {c}" for a in tiny_words[:20] for b in tiny_words for c in "abc"])
    assert first.budget.chosen in (64, 128, 256)
    assert load(tiny_model, threads=2).budget.chosen == first.budget.chosen
    assert load(tiny_model, threads=2, layers=(1,)).budget.chosen is None


# --------------------------------------------------------------------------- lanes


def test_lanes_share_the_steps_and_tell_the_caller():
    lanes = Lanes(CPU, 3)
    left, lock, threads, told = list(range(50)), threading.Lock(), set(), []

    def step():
        with lock:
            threads.add(threading.current_thread().name)
            return left.pop() if left else None

    lanes.run(step, told.append)
    assert sorted(told) == list(range(50))
    assert threading.current_thread().name not in threads
    lanes.run(step, told.append, alone=True)
    assert threading.current_thread().name in threads


def test_a_lane_keeps_its_share_of_the_cores():
    lanes = Lanes(CPU, 2)
    left, seen = iter(range(8)), []

    def step():
        if next(left, None) is None:
            return None
        torch.ones(8) @ torch.ones(8)
        seen.append(torch.get_num_threads())
        return 0

    lanes.run(step, lambda _: None)
    assert seen == [1] * 8


def test_what_a_step_or_the_caller_raises_stops_the_lanes():
    lanes = Lanes(CPU, 2)
    steps = []

    def failing():
        steps.append(1)
        if len(steps) == 5:
            raise ValueError("broken")
        return 1

    with pytest.raises(ValueError, match="broken"):
        lanes.run(failing, lambda rows: None)

    def interrupt(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lanes.run(lambda: 1, interrupt)
    taken = iter([1, 1])
    heard = []
    lanes.run(lambda: next(taken, None), heard.append)
    assert heard == [1, 1]


# --------------------------------------------------------------------------- long texts


@given(st.lists(st.text("ab", max_size=9), max_size=30))
def test_chunks_hold_so_many_texts_and_characters(texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_CHUNK_TEXTS", 4)
        patch.setattr(batching, "_CHUNK_CHARACTERS", 12)
        chunks = list(batching.chunks(texts))
    assert [text for chunk in chunks for text in chunk] == texts
    assert all(len(chunk) == 1 or sum(map(len, chunk)) <= 12 for chunk in chunks)
    assert all(1 <= len(chunk) <= 4 for chunk in chunks)
    # None could have held the first text of the next one too.
    for chunk, (first, *_) in itertools.pairwise(chunks):
        assert len(chunk) == 4 or sum(map(len, chunk)) + len(first) > 12


@pytest.fixture(scope="module", params=["tiny", "minilm"])
def bert(request, tiny_model):
    folder = tiny_model if request.param == "tiny" else find_model("all-MiniLM-L6-v2").path
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
def test_the_tokens_kept_are_those_of_the_whole_text(bert, texts, max_length, letters):
    whole = [bert(text, truncation=False, verbose=False)["input_ids"] for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_CHARACTERS_A_TOKEN", letters)
        window = tokenize(bert, texts, max_length=max_length)
    assert window.truncated.tolist() == [len(ids) > max_length for ids in whole]
    for i, ids in enumerate(whole):
        assert row(window, i) == (
            ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]
        )


class _Reading:
    """A tokenizer's backend that notes how many characters it is given."""

    def __init__(self, backend):
        self._backend, self.read = backend, []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts):
        self.read += map(len, texts)
        return self._backend.encode_batch_fast(texts)


def lengths_read(tokenizer, texts, *, side="right"):
    reading = _Reading(tokenizer.backend_tokenizer)
    given = SimpleNamespace(backend_tokenizer=reading, truncation_side=side, pad_token_id=0)
    window = tokenize(given, texts, max_length=8)
    return reading.read, window.truncated.tolist()


def test_of_a_long_text_no_more_is_read_than_it_takes(bert):
    assert lengths_read(bert, ["the cat " * 1000, "日本" * 5000]) == ([512, 512], [True, True])
    assert lengths_read(bert, ["the cat " * 64]) == ([512], [True])
    # Too few tokens in what was read first, nowhere to stop, and a text that is kept at its end.
    assert lengths_read(bert, ["the" + " " * 9000 + "cat"]) == ([512, 9006], [False])
    assert lengths_read(bert, ["x" * 9000]) == ([9000], [False])
    assert lengths_read(bert, ["the cat " * 1000], side="left") == ([8000], [True])


def test_other_tokenizers_read_all_of_a_text(tiny_model):
    def changed(name, value):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
        setattr(tokenizer.backend_tokenizer, name, value)
        return tokenizer

    spaced = transformers.AutoTokenizer.from_pretrained(tiny_model)
    spaced.backend_tokenizer.add_special_tokens(["the cat"])
    normalizers, splits = tokenizers.normalizers, tokenizers.pre_tokenizers
    for other in (
        spaced,
        changed("pre_tokenizer", splits.Whitespace()),
        changed("normalizer", normalizers.NFC()),
        changed("normalizer", normalizers.BertNormalizer(handle_chinese_chars=False)),
    ):
        assert lengths_read(other, ["the cat " * 1000]) == ([8000], [True])


def test_a_token_beyond_32_bits_is_an_error_of_the_model() -> None:
    class Tokenizer:
        pad_token_id = 0

        def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[2**31] for _ in texts]}

    with pytest.raises(EncoderError, match="use the tokenizer that the model was trained with"):
        tokenize(Tokenizer(), ["a"], max_length=8)
