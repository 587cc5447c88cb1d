"""The encoder: texts in, pooled and unnormalised embeddings out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whiten_index.artifacts.prefetch import overlapped
from whiten_index.encoding.batching import (
    LADDERS,
    Batches,
    Lanes,
    PreparedWindow,
    TokenBudget,
    remember,
    remembered,
)
from whiten_index.encoding.devices import chosen_devices
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.pooling import Pooling
from whiten_index.encoding.spec import (
    EncoderSpec,
    prompt_tokens,
    resolve_encoder,
    states_spec,
)
from whiten_index.encoding.tokenization import TokenWindow, tokenize
from whiten_index.encoding.transformer import LayeredTransformer, Transformer
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.whitening.moments import MEAN_OF_EVERY, Moments

WINDOW_ROWS = {"cpu": 16_384, "other": 65_536}
# Below so many tokens one batch on all cores answers a query sooner than a batch a core.
_TOKENS_WORTH_A_LANE = 128
_BATCHES_A_LANE = 4


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encoder made of n texts.

    Attributes:
        embeddings: (n, d) float32, in the order of the texts.
        truncated: (n,) bool, which texts were longer than the token limit.
        tokens: tokens encoded, padding not counted, identical texts once.
        padded_tokens: the same with padding.
        distinct: how many texts were encoded, the rest being identical to one of them.
    """

    embeddings: NDArray[np.float32]
    truncated: NDArray[np.bool_]
    tokens: int
    padded_tokens: int
    distinct: int
    _on_device: _OnDevice | None = field(default=None, repr=False)

    def moments_of(self, rows: slice) -> Callable[[str], Moments] | None:
        """Return what gives the moments of ``rows`` as kept in a type named as by numpy.

        None where the embeddings were never elsewhere than in this machine's memory.
        """
        on_device = self._on_device
        if on_device is None:
            return None

        def moments(dtype: str) -> Moments:
            try:
                return on_device.moments(rows, dtype)
            except torch.OutOfMemoryError:
                return Moments.of(self.embeddings[rows].astype(dtype))

        return moments


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """The embeddings (m, d) of a window that are still on a device, and the stream to use there."""

    embeddings: Tensor
    places: NDArray[np.int64]
    stream: torch.cuda.Stream

    def moments(self, rows: slice, dtype: str) -> Moments:
        with torch.cuda.stream(self.stream):
            places = torch.from_numpy(self.places[rows]).to(self.embeddings.device)
            return moments_on_device(self.embeddings[places].to(getattr(torch, dtype)))


@dataclass(frozen=True, slots=True)
class RanWindow:
    """A window whose embeddings are computed, or will be once the device is done with it."""

    prepared: PreparedWindow
    embeddings: Tensor
    padded_tokens: int
    arrived: torch.cuda.Event | None
    on_device: _OnDevice | None


class Encoder:
    """A Transformer with its tokenizer, pooling and device.

    Attributes:
        spec: what makes its embeddings what they are.
        device: where it runs.
        budget: how many tokens a batch holds.
    """

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.spec = spec
        # Of several devices an encoder takes the first; a job has an encoder each.
        self.device = _device(chosen_devices(config.device)[0])
        self._transformer = self._open(spec, folder)
        prompts = {spec.document_prompt, spec.query_prompt}
        self._unpooled = {prompt: self._count_unpooled(prompt) for prompt in prompts}
        self._lanes = Lanes(self.device, config.threads)
        self._facts = {
            "weights": spec.weights_sha256,
            "layers": max(spec.layers),
            "dtype": spec.dtype,
            "device": _device_name(self.device),
            "lanes": self._lanes.count,
            "packs": self._transformer.packs,
            "torch": torch.__version__,
        }
        self._kept = remembered(self._facts)
        self.budget = TokenBudget(LADDERS[_kind(self.device)], known=self._kept)

    @classmethod
    def load(cls, model: str | None = None, **options: Any) -> Encoder:
        """Load a model by hub name, local folder, or None for the embedded one.

        Args:
            model: see ``find_model``.
            options: the other fields of ``EncoderConfig``.

        Raises:
            EncoderError: the model cannot be found or loaded.
            ConfigError: an option does not fit the model or the machine.
        """
        config = EncoderConfig(model=model, **options)
        return cls(*resolve_encoder(config), config)

    @property
    def dim(self) -> int:
        """Width d of the embeddings."""
        return self.spec.dim

    @property
    def fingerprint(self) -> str:
        """Identity of the embeddings of documents: equal fingerprints, equal embeddings."""
        return self.spec.fingerprint

    @property
    def query_fingerprint(self) -> str:
        """The same of the embeddings of queries."""
        return self.spec.query_fingerprint

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of the libraries that compute, and whether inputs are packed or padded."""
        versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
        return {**versions, "inputs": "packed" if self._transformer.packs else "padded"}

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of documents, (n, d) float32, unnormalised.

        Texts are sorted by length inside windows of tens of thousands, and come back in order.

        Raises:
            EncoderError: the model gives NaN or infinity.
        """
        texts = _listed(texts)
        embeddings = np.empty((len(texts), self.dim), dtype=np.float32)
        filled = 0
        for block in self.stream([texts]):
            embeddings[filled : filled + len(block)] = block
            filled += len(block)
        return embeddings

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of queries, (n, d): with the model's query prompt, if any."""
        prepared = self._prepare(_listed(texts), self.spec.query_prompt, hurried=True)
        return self.collect(self.run(prepared)).embeddings

    def stream(
        self,
        chunks: Iterable[Sequence[str]],
        *,
        advance: Callable[[int], None] | None = None,
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the embeddings of documents without end, in memory bounded by a few windows.

        Args:
            chunks: see ``stream_windows``.
            advance: see ``stream_windows``.

        Yields:
            (m, d) float32, the texts' order kept, m being unrelated to the chunks.
        """
        for encoded in self.stream_windows(chunks, advance=advance):
            yield encoded.embeddings

    def stream_windows(
        self,
        chunks: Iterable[Sequence[str]],
        *,
        advance: Callable[[int], None] | None = None,
    ) -> Iterator[Encoded]:
        """Yield what is made of documents without end, window by window, their order kept.

        Chunks are joined or split to windows of tens of thousands of texts; reading and tokenising
        them happens beside the encoding.

        Args:
            chunks: lists of texts, drawn in another thread.
            advance: told how many texts each batch held, as it is done.
        """
        yield from overlapped(
            _windows(chunks, self.window_rows),
            read=_same,
            prepare=self.prepare,
            work=functools.partial(self.run, advance=advance),
            finish=self.collect,
        )

    @property
    def window_rows(self) -> int:
        """How many texts are sorted by length together."""
        return WINDOW_ROWS[_kind(self.device)]

    def encode_window(
        self, texts: Sequence[str], *, advance: Callable[[int], None] | None = None
    ) -> Encoded:
        """Encode a window of documents, sorted by length inside, in their order outside.

        Args:
            texts: n texts, as many as may be held tokenised at once.
            advance: told how many texts each batch held, as it is done.
        """
        return self.collect(self.run(self.prepare(texts), advance=advance))

    def prepare(self, texts: Sequence[str]) -> PreparedWindow:
        """Tokenise a window of documents and start its way to the device.

        This, ``run`` and ``collect`` may overlap for different windows, each in one thread.
        """
        return self._prepare(_listed(texts), self.spec.document_prompt, hurried=False)

    def run(
        self, prepared: PreparedWindow, *, advance: Callable[[int], None] | None = None
    ) -> RanWindow:
        """Encode a prepared window; on a device this returns before it is done.

        Args:
            prepared: by ``prepare``.
            advance: told how many texts each batch held, as it is done.

        Raises:
            EncoderError: one text alone does not fit into the memory.
        """
        # Several batches a lane, so that none is long without work at the end and little is padded.
        if prepared.ready is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(prepared.ready)
            for tensor in (prepared.ids, prepared.offsets):
                tensor.record_stream(here)
        share = len(prepared.tokens.ids) // self._lanes.count
        little = share <= _TOKENS_WORTH_A_LANE
        alone = little and prepared.hurried
        split = not little and self._lanes.count > 1
        most = max(share // _BATCHES_A_LANE, _TOKENS_WORTH_A_LANE) if split else None
        batches = Batches(
            prepared,
            self._transformer,
            self.budget,
            dim=self.dim,
            most=most,
            clock=self._lanes.clock,
        )
        self._lanes.run(batches.step, _counting_all(advance, prepared.tokens), alone=alone)
        self._remember_budget()
        if self.device.type != "cuda":
            return RanWindow(prepared, batches.embeddings.cpu(), batches.padded_tokens, None, None)
        host, arrived, stream = self._to_host(batches.embeddings)
        kept = _OnDevice(batches.embeddings, prepared.tokens.places, stream)
        return RanWindow(prepared, host, batches.padded_tokens, arrived, kept)

    def collect(self, ran: RanWindow) -> Encoded:
        """Return what ``run`` made, in the order of the texts.

        Raises:
            EncoderError: the model gives NaN or infinity.
        """
        if ran.arrived is not None:
            ran.arrived.synchronize()
        tokens = ran.prepared.tokens
        distinct: NDArray[np.float32] = ran.embeddings.numpy()
        finite = np.asarray(np.isfinite(distinct).all(axis=1))
        if not finite.all():
            broken = int(np.argmin(finite[tokens.places]))
            raise EncoderError(
                f"model {self.spec.model} in {self.spec.dtype} gives NaN or infinity for "
                f"{ran.prepared.texts[broken][:60]!r}; use --dtype float32 or bfloat16"
            )
        return Encoded(
            embeddings=distinct[tokens.places],
            truncated=tokens.truncated,
            tokens=len(tokens.ids),
            padded_tokens=ran.padded_tokens,
            distinct=len(distinct),
            _on_device=ran.on_device,
        )

    def _open(self, spec: EncoderSpec, folder: ModelFolder) -> Transformer:
        return Transformer(spec, folder, self.device)

    def _prepare(self, texts: Sequence[str], prompt: str, *, hurried: bool) -> PreparedWindow:
        prompted = [prompt + text for text in texts]
        lowered = [text.lower() for text in prompted] if self.spec.lower_case else prompted
        tokenizer = self._transformer.tokenizer
        tokens = tokenize(tokenizer, lowered, max_length=self.spec.max_length)
        _require_known(tokens, self.spec, self._transformer.vocabulary)
        (ids, offsets), ready = self._to_device(tokens.ids, tokens.offsets)
        unpooled = self._unpooled[prompt]
        return PreparedWindow(texts, tokens, ids, offsets, unpooled, hurried, ready)

    def _count_unpooled(self, prompt: str) -> int:
        """Return how many tokens of a prompt are left out of the pooling.

        Raises:
            ConfigError: the prompt leaves no room for a text.
        """
        spec = self.spec
        lowered = prompt.lower() if spec.lower_case else prompt
        tokens = prompt_tokens(self._transformer.tokenizer, lowered)
        if tokens + 1 >= spec.max_length:
            raise ConfigError(
                f"the prompt {prompt[:40]!r} has {tokens} tokens and leaves no room in the "
                f"{spec.max_length} of a text; use a shorter prompt or a greater --max-length"
            )
        return 0 if spec.pools_prompt else tokens

    def _to_device(self, *arrays: NDArray[Any]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Start the way of arrays to the device; the event tells when it is over."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if self.device.type != "cuda":
            return [tensor.to(self.device) for tensor in tensors], None
        # From pinned memory, on a stream of its own, beside the kernels of the window before.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            there = [t.pin_memory().to(self.device, non_blocking=True) for t in tensors]
        return there, stream.record_event()

    def _to_host(self, embeddings: Tensor) -> tuple[Tensor, torch.cuda.Event, torch.cuda.Stream]:
        """Start the way back from the device; the event tells when it is over."""
        host = torch.empty(embeddings.shape, dtype=embeddings.dtype, pin_memory=True)
        # On a stream of its own, it waits for this window's kernels and for no other window's.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host.copy_(embeddings, non_blocking=True)
            embeddings.record_stream(stream)
        return host, stream.record_event(), stream

    def _remember_budget(self) -> None:
        chosen = self.budget.chosen
        if chosen is not None and self.budget.thorough and chosen != self._kept:
            remember(self._facts, chosen)
            self._kept = chosen


def _counting_all(
    advance: Callable[[int], None] | None, tokens: TokenWindow
) -> Callable[[int], None]:
    """Return an ``advance`` that counts texts encoded only once as often as they occur."""
    repeated = len(tokens) - (len(tokens.offsets) - 1)
    left = [repeated]

    def told(rows: int) -> None:
        if advance is not None:
            advance(rows + left[0])
        left[0] = 0

    return told


def _windows(chunks: Iterable[Sequence[str]], rows: int) -> Iterator[list[str]]:
    """Yield the texts of ``chunks`` in lists of ``rows``, the last one shorter."""
    held: list[str] = []
    for chunk in map(_listed, chunks):
        for start in range(0, len(chunk), rows):
            held += chunk[start : start + rows]
            if len(held) >= rows:
                yield held[:rows]
                held = held[rows:]
    if held:
        yield held


def _same(texts: list[str]) -> list[str]:
    return texts


def _listed(texts: Sequence[str]) -> Sequence[str]:
    if isinstance(texts, str):
        raise ConfigError("encode takes a list of texts; put the one text in brackets")
    listed = texts if isinstance(texts, list) else list(texts)
    for text in listed:
        if not isinstance(text, str):
            raise ConfigError(f"encode takes texts, and {text!r:.60} is none; convert or drop it")
    return listed


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "other"


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        # A device that computes nothing, such as meta, has nothing to give back.
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0][:100]}); "
            "use --device auto or cpu"
        ) from error
    return device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _require_known(tokens: TokenWindow, spec: EncoderSpec, vocabulary: int | None) -> None:
    """Refuse tokens that the model has no embedding for, which would end a GPU's process.

    Raises:
        EncoderError: the tokenizer is not the one that the model was trained with.
    """
    if not len(tokens.ids):
        return
    most, longest = int(tokens.ids.max()), int(tokens.lengths[0])
    if vocabulary is not None and not 0 <= tokens.ids.min() <= most < vocabulary:
        raise EncoderError(
            f"the tokenizer of {spec.model} gives token {most}, and the model knows {vocabulary} "
            "tokens; use the tokenizer that the model was trained with"
        )
    if longest > spec.max_length:
        raise EncoderError(
            f"the tokenizer of {spec.model} gives {longest} tokens for a text cut to "
            f"{spec.max_length}; use the tokenizer that the model was trained with"
        )


_WINDOW_BYTES = 256 << 20


class StateEncoder(Encoder):
    """Gives the pooled states of all layers, 0 (embeddings) to L, side by side.

    A text has P·S·d numbers in float32: by pooling, by layer (S = L + 1), by coordinate. Heads and
    normalisations that a model's folder adds after pooling are left out: they have no meaning for
    lower layers.

    Attributes:
        poolings: the P ways of pooling.
        layers: S, how many states there are.
        width: d of one state.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        folder: ModelFolder,
        config: EncoderConfig,
        *,
        poolings: Sequence[str] = ("mean",),
    ) -> None:
        self.poolings = tuple(poolings)
        self.layers, self.width = folder.layers + 1, folder.hidden_size
        super().__init__(states_spec(spec, folder, self.poolings), folder, config)

    @classmethod
    def load(
        cls, model: str | None = None, *, poolings: Sequence[str] = ("mean",), **options: Any
    ) -> StateEncoder:
        """Load a model; see ``Encoder.load``, whose ``pooling`` and ``layers`` play no part."""
        config = EncoderConfig(model=model, **options)
        return cls(*resolve_encoder(config), config, poolings=poolings)

    @property
    def window_rows(self) -> int:
        """How many texts are sorted by length together: fewer where a text has many numbers."""
        return max(min(super().window_rows, _WINDOW_BYTES // (4 * self.dim)), 1)

    def _open(self, spec: EncoderSpec, folder: ModelFolder) -> Transformer:
        return LayeredTransformer(
            spec, folder, self.device, [Pooling(each) for each in self.poolings]
        )


_BLOCK_ROWS = 8192


@torch.inference_mode()
def moments_on_device(rows: Tensor) -> Moments:
    """Return the moments of rows (n, d) on any device that computes in float64.

    Shifts, products and sums are those of ``Moments.of``, in float64 and block by block; only the
    order of the additions differs.
    """
    n, d = rows.shape
    if n == 0:
        return Moments.empty(d)
    point = rows[::MEAN_OF_EVERY].mean(dim=0, dtype=torch.float64)
    first, third = (torch.zeros_like(point) for _ in range(2))
    second, fourth = point.new_zeros(d, d), point.new_zeros(())
    for i in range(0, n, _BLOCK_ROWS):
        y = rows[i : i + _BLOCK_ROWS].double() - point
        square = torch.linalg.vecdot(y, y)
        first += y.sum(dim=0)
        second.addmm_(y.T, y)
        third.addmv_(y.T, square)
        fourth += square @ square
    return Moments.from_sums(
        _array(point),
        count=float(n),
        first=_array(first),
        # A general product does not promise to be symmetric to the bit.
        second=_array((second + second.T) / 2),
        third=_array(third),
        fourth=float(fourth),
    )


def _array(values: Tensor) -> NDArray[np.float64]:
    return np.asarray(values.cpu().numpy(), dtype=np.float64)
