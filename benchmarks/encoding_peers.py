"""Who takes part in the encoding benchmark: we, sentence-transformers, and what bounds both.

Each contender encodes the same texts whenever it is called, and tells once how much it pads.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.encoding_inputs import MAX_LENGTH
from whiten_index.encoding.encoder import Encoder
from whiten_index.encoding.encoder_config import BackendName, DtypeName
from whiten_index.encoding.load_encoder import load_encoder
from whiten_index.encoding.models import find_model
from whiten_index.encoding.tokenization import TokenWindow, tokenize

CHUNK_ROWS = 1024
OURS, OURS_STREAM = "ours, one list", "ours, stream"
PEER, PEER_STREAM = "sentence-transformers, one list", "sentence-transformers, stream"
PEER_TUNED = "sentence-transformers, tuned, one list"
PEER_HALF = "sentence-transformers at our precision, one list"
PEER_PACKED = "sentence-transformers at our precision without padding, one list"
BARE, TOKENISER = "bare sorted model", "tokeniser alone"
_PACKED_ATTENTION = "flash_attention_of_torch"
_PEER_LIBRARY, _PEER_BATCH_SIZE = "sentence-transformers", 32
_BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128), "cuda": (32, 64, 128, 256, 512, 1024)}
_TUNING_TEXTS = {"cpu": 512, "cuda": 4_096}
_TOKENISER_CHUNKS = (1024, 8192, 65_536)
_BUDGETS = {"cpu": (512, 1024, 2048, 4096, 8192), "gpu": (16_384, 32_768, 65_536, 131_072, 262_144)}

Embeddings = NDArray[np.float32]


@dataclass(frozen=True)
class Contender:
    """One way to encode the texts.

    Attributes:
        name: in the results.
        run: encodes all texts and yields their embeddings in order; what is no encoder yields none.
        padding: runs once without being timed and returns the share of tokens that is padding.
        facts: what it was set to.
    """

    name: str
    run: Callable[[], Iterator[Embeddings]]
    padding: Callable[[], float | None]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What every contender shares.

    Attributes:
        model: folder that both libraries load.
        device: ``cpu`` or ``cuda``.
        dtype: ours; the peer has its default and, where they differ, this one too.
    """

    model: str
    device: str
    dtype: DtypeName


# --------------------------------------------------------------------------- we


def load_ours(setting: Setting, backend: BackendName = "torch") -> Encoder:
    """Load our encoder; of models with prompts the peer would be given other texts."""
    encoder = load_encoder(
        setting.model, max_length=MAX_LENGTH, device=setting.device, dtype=setting.dtype,
        backend=backend,
    )  # fmt: skip
    assert isinstance(encoder, Encoder), "torch runs it"
    if encoder.spec.document_prompt:
        raise SystemExit(f"{setting.model} has a prompt for documents; measure one without")
    return encoder


def ours(encoder: Encoder, texts: list[str]) -> list[Contender]:
    """Return our two ways; both sort inside the same windows, so both pad alike."""
    padding = functools.cache(lambda: _our_padding(encoder, texts))

    def in_one_list() -> Iterator[Embeddings]:
        yield encoder.encode(texts)

    return [
        Contender(OURS, in_one_list, padding),
        Contender(OURS_STREAM, lambda: encoder.stream(_chunks(texts)), padding),
    ]


def _our_padding(encoder: Encoder, texts: list[str]) -> float:
    windows = [*_chunks(texts, encoder.window_rows)]
    encoded = [encoder.encode_window(window) for window in windows]
    return 1 - sum(each.tokens for each in encoded) / sum(each.padded_tokens for each in encoded)


# --------------------------------------------------------------------------- sentence-transformers


def peer_version() -> str:
    """Return the peer's release, or end the program and say how to install it."""
    try:
        return version(_PEER_LIBRARY)
    except PackageNotFoundError as error:
        raise SystemExit(f"the peer is missing: pip install {_PEER_LIBRARY}") from error


def load_peer(setting: Setting, *, dtype: str | None = None, **options: Any) -> Any:
    """Load sentence-transformers' encoder, in its own default or in ``dtype``."""
    library = importlib.import_module("sentence_transformers")
    transformers.utils.logging.disable_progress_bar()
    if dtype is not None:
        options["dtype"] = getattr(torch, dtype)
    peer = library.SentenceTransformer(
        setting.model, device=setting.device, model_kwargs=options or None
    )
    peer.max_seq_length = MAX_LENGTH
    return peer


def peers(peer: Any, texts: list[str]) -> list[Contender]:
    """Return the peer's two ways at its defaults."""
    return [_peer(PEER, peer, [texts]), _peer(PEER_STREAM, peer, [*_chunks(texts)])]


def tuned_peer(peer: Any, texts: list[str], name: str = PEER_TUNED) -> Contender:
    """Return the peer with its best batch size."""
    return _peer(name, peer, [texts], batch_size=_best_batch_size(peer, texts))


def _best_batch_size(peer: Any, texts: list[str]) -> int:
    """Return the batch size that takes the least time, of the lesser of two runs each."""
    some, device = texts[:: max(len(texts) // _TUNING_TEXTS[peer.device.type], 1)], str(peer.device)

    def seconds(size: int) -> float:
        run = functools.partial(peer.encode, some, batch_size=size, show_progress_bar=False)
        return min(_seconds(run, device) for _ in range(2))

    return min(_BATCH_SIZES[peer.device.type], key=seconds)


def peer_at_our_precision(peer: Any, texts: list[str]) -> Contender:
    """Return the peer's one list, for a peer loaded in our dtype."""
    return _peer(PEER_HALF, peer, [texts])


def load_packed_peer(setting: Setting, kernel: Callable[..., Tensor] | None = None) -> Any:
    """Load the peer so that it lays texts end to end, which it does for FlashAttention alone.

    The package flash-attn is built for each release of torch and is often missing: its place is
    taken by ``kernel``, by default torch's own FlashAttention.
    """
    from transformers import modeling_flash_attention_utils as attention
    from transformers.integrations.flash_attention import flash_attention_forward

    given = kernel or _flash_attention
    functions = (None, given, None, attention._pad_input, attention._unpad_input)
    attention._lazy_imports = lambda *_, **__: functions
    transformers.AttentionInterface.register(_PACKED_ATTENTION, flash_attention_forward)
    transformers.AttentionMaskInterface.register(
        _PACKED_ATTENTION, transformers.AttentionMaskInterface()["flash_attention_2"]
    )
    peer = load_peer(setting, dtype=setting.dtype, attn_implementation=_PACKED_ATTENTION)
    if not peer[0].can_flatten_inputs:
        raise SystemExit(f"{_PEER_LIBRARY} {peer_version()} pads {setting.model}")
    return peer


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend as the package flash-attn does, (T, heads, k), with torch's kernel."""
    from torch.nn.attention import varlen

    attended = varlen.varlen_attn(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        scale=softmax_scale, window_size=(-1, 0 if causal else -1),
    )  # fmt: skip
    assert isinstance(attended, Tensor)
    return attended


def _peer(
    name: str, peer: Any, lists: Sequence[list[str]], *, batch_size: int = _PEER_BATCH_SIZE
) -> Contender:
    def run() -> Iterator[Embeddings]:
        for texts in lists:
            yield peer.encode(texts, batch_size=batch_size, show_progress_bar=False)

    def padding() -> float:
        with _counted(peer) as counts:
            for _ in run():
                pass
        return 1 - counts[0] / counts[1]

    dtype = str(next(peer.parameters()).dtype).removeprefix("torch.")
    return Contender(name, run, padding, {"dtype": dtype, "batch_size": batch_size})


@contextmanager
def _counted(peer: Any) -> Iterator[list[int]]:
    """Count the peer's tokens, without padding and with it, in the batches it really makes."""
    counts, original = [0, 0], peer.preprocess

    def preprocess(*args: Any, **options: Any) -> Any:
        features = original(*args, **options)
        ids, mask = features["input_ids"], features.get("attention_mask")
        counts[0] += ids.numel() if mask is None else int(mask.sum())
        counts[1] += ids.numel()
        return features

    peer.preprocess = preprocess
    try:
        yield counts
    finally:
        del peer.preprocess


# --------------------------------------------------------------------------- what bounds us


def tokens_of(setting: Setting, texts: list[str]) -> TokenWindow:
    """Return the texts' tokens, longest text first."""
    folder = find_model(setting.model)
    given = [text.lower() for text in texts] if folder.lower_case else texts
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path)
    return tokenize(tokenizer, given, max_length=MAX_LENGTH)


def bounds(setting: Setting, texts: list[str], tokens: TokenWindow) -> list[Contender]:
    """Return the model alone on batches made beforehand, and the tokeniser alone."""
    found = [_bare(setting, tokens), _tokeniser(setting, texts)]
    return [contender for contender in found if contender is not None]


def _bare(setting: Setting, tokens: TokenWindow) -> Contender:
    """The forward pass on padded batches of like length, all cores on one batch, no pooling."""
    model = _bare_model(setting)

    def batches(budget: int) -> list[dict[str, Any]]:
        return [_padded(tokens, rows, setting) for rows in _cut(tokens, budget)]

    budget, made = _best_budget(batches, lambda batch: model(**batch), setting.device)
    padded = sum(batch["input_ids"].numel() for batch in made)
    return _forward(BARE, lambda batch: model(**batch), made, budget, 1 - len(tokens.ids) / padded)


def _forward(
    name: str, forward: Callable[[Any], Any], batches: list[Any], budget: int, padding: float
) -> Contender:
    def run() -> Iterator[Embeddings]:
        _run_all(forward, batches)
        yield from ()

    return Contender(name, run, lambda: padding, {"token_budget": budget})


def _tokeniser(setting: Setting, texts: list[str]) -> Contender | None:
    """The fast tokenizer on all cores, in chunks of the best of a few sizes."""
    folder = find_model(setting.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_padding()
    backend.enable_truncation(MAX_LENGTH)

    def all_in(size: int) -> None:
        for chunk in _chunks(texts, size):
            backend.encode_batch_fast(chunk)

    sizes = sorted({min(size, len(texts)) for size in _TOKENISER_CHUNKS})
    size = min(sizes, key=lambda size: _seconds(functools.partial(all_in, size), "cpu"))

    def run() -> Iterator[Embeddings]:
        all_in(size)
        yield from ()

    return Contender(TOKENISER, run, lambda: None, {"chunk": size})


def _bare_model(setting: Setting) -> Any:
    path: Path = find_model(setting.model).path
    model = transformers.AutoModel.from_pretrained(path, dtype=getattr(torch, setting.dtype))
    return model.to(setting.device).eval()


def _cut(tokens: TokenWindow, budget: int) -> Iterator[slice]:
    """Yield the rows of batches of ``budget`` tokens, those of padding counted."""
    lengths, start = tokens.lengths, 0
    while start < len(lengths):
        stop = min(start + max(budget // int(lengths[start]), 1), len(lengths))
        yield slice(start, stop)
        start = stop


def _padded(tokens: TokenWindow, rows: slice, setting: Setting) -> dict[str, Any]:
    lengths = tokens.lengths[rows]
    mask = np.arange(lengths[0]) < lengths[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = tokens.ids[tokens.offsets[rows.start] : tokens.offsets[rows.stop]]
    there = None if mask.all() else torch.from_numpy(mask.astype(np.int64)).to(setting.device)
    return {"input_ids": torch.from_numpy(ids).to(setting.device), "attention_mask": there}


def _best_budget(
    batches: Callable[[int], list[Any]], forward: Callable[[Any], Any], device: str
) -> tuple[int, list[Any]]:
    """Return the token budget that takes the least time, and its batches."""
    seconds: dict[int, float] = {}
    for budget in _BUDGETS["cpu" if device == "cpu" else "gpu"]:
        made = batches(budget)
        try:
            _run_all(forward, made[:2])
            seconds[budget] = _seconds(functools.partial(_run_all, forward, made), device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    best = min(seconds, key=lambda budget: seconds[budget])
    return best, batches(best)


@torch.inference_mode()
def _run_all(forward: Callable[[Any], Any], batches: list[Any]) -> None:
    for batch in batches:
        forward(batch)


def _seconds(run: Callable[[], Any], device: str) -> float:
    wait_for(device)
    started = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - started


def wait_for(device: str) -> None:
    """Wait until a GPU has done all it was told; without one there is nothing to wait for."""
    if device != "cpu":
        torch.cuda.synchronize()


def _chunks(texts: list[str], rows: int = CHUNK_ROWS) -> Iterator[list[str]]:
    for start in range(0, len(texts), rows):
        yield texts[start : start + rows]
