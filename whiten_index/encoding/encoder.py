"""The encoder: texts in, pooled and unnormalised embeddings out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whiten_index.encoding.batching import Batches, InferenceThreads, PreparedWindow
from whiten_index.encoding.encoder_config import EncoderConfig, chosen_devices
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.products import has_bfloat16
from whiten_index.encoding.spec import EncoderSpec, local_model
from whiten_index.encoding.static import StaticModel
from whiten_index.encoding.tokenization import require_known_tokens, tokenize, unpooled_tokens
from whiten_index.encoding.transformer import Transformer
from whiten_index.encoding.window_encoder import Encoded, WindowEncoder, listed
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.whitening.moments import MEAN_OF_EVERY, Moments

# Below this, one batch on all cores answers a query sooner than one batch a core.
_TOKENS_WORTH_A_THREAD = 128
_BATCHES_A_THREAD = 2
# Smaller ones multiply small matrices: 64 queries of 17 tokens took 1.17 times as long in batches
# of 133 (2 cores).
_TOKENS_OF_A_BATCH = 256


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """The embeddings (m, d) of a window on a device and on the host."""

    embeddings: Tensor
    host: Tensor
    places: NDArray[np.int64]
    stream: torch.cuda.Stream

    def moments(self, rows: slice, dtype: str) -> Moments:
        places = self.places[rows]
        try:
            with torch.cuda.stream(self.stream):
                there = torch.from_numpy(places).to(self.embeddings.device)
                return _moments_on_device(self.embeddings[there].to(getattr(torch, dtype)))
        except torch.OutOfMemoryError:
            return Moments.of(self.host.numpy()[places].astype(dtype))


@dataclass(frozen=True, slots=True)
class RanWindow:
    """A window whose embeddings are computed, or are being computed on a device."""

    prepared: PreparedWindow
    embeddings: Tensor
    padded_tokens: int
    out_of_memory: int  # batches that were tried again in halves
    arrived: torch.cuda.Event | None = None
    on_device: _OnDevice | None = None


class Encoder(WindowEncoder):
    """A Transformer or a static model, with its tokenizer, pooling and device.

    Attributes:
        spec: identity of the encoder.
        device: device that it runs on.

    Examples:
        >>> encoder = Encoder.load("all-MiniLM-L6-v2", pooling="mean")
        >>> encoder.encode(["A cat sat on the mat."]).shape
        (1, 384)
    """

    spec: EncoderSpec
    transformer = Transformer

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.spec = spec
        # A job on several devices has one encoder for each of them.
        self.device = _device(chosen_devices(config.device)[0])
        if config.backend == "openvino" and self.device.type != "cpu":
            raise ConfigError(
                f"--backend openvino is for CPUs, and the device is {self.device}; add --device "
                "cpu, or use --backend torch"
            )
        kind = StaticModel if folder.static else self.transformer
        self._transformer = kind(spec, folder, self.device, config.backend)
        prompts = {spec.document_prompt, spec.query_prompt}
        self._unpooled = {
            prompt: unpooled_tokens(self._transformer.tokenizer, spec, prompt) for prompt in prompts
        }
        alone = self._transformer.one_length  # a batch has all cores
        self._threads = InferenceThreads(self.device, config.threads, alone=alone)

    def __repr__(self) -> str:
        return f"Encoder({self.spec.model!r}, {self.spec.dim} dims, {self.device})"

    @classmethod
    def load(cls, model: str | None = None, **options: Any) -> "Encoder":
        """Load a model by hub name, local folder, or None for the embedded one.

        Args:
            model: see ``find_model``.
            options: the other fields of ``EncoderConfig``.

        Raises:
            EncoderError: the model cannot be found or loaded.
            ConfigError: an option does not fit the model or the machine.
        """
        config = EncoderConfig(model=model, **options)
        spec, folder = local_model(config)
        if config.onnx:
            raise ConfigError("ONNX Runtime has its own encoder: whiten_index.load_encoder")
        return cls(spec, folder, config)

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of the libraries, the form of inputs, and the products."""
        transformer = self._transformer
        own = ("openvino",) if transformer.one_length else ()
        versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", *own)}
        return {**versions, "inputs": transformer.inputs, "products": transformer.products}

    @property
    def note(self) -> str | None:
        """Note on a faster type, or on one that is not used here; None without any."""
        dtype, on_cpu = self.spec.dtype, self.device.type == "cpu"
        if isinstance(self._transformer, StaticModel):
            return None
        if dtype == "float32" and on_cpu and has_bfloat16():
            return (
                "note: --dtype bfloat16 encodes 1.5 to 3 times as fast on this processor and keeps "
                "99.4 to 99.9 % of the ten nearest (MiniLM); it encodes all rows again"
            )
        narrow = dtype == "int8" or (dtype == "bfloat16" and on_cpu)
        if narrow and not self._transformer.products.endswith(dtype):
            return f"note: this model is encoded in float32 on this machine, not in {dtype}"
        return None

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of queries, (n, d): with the model's query prompt, if any."""
        prepared = self._prepare(listed(texts), self.spec.query_prompt, low_latency=True)
        return self.collect(self.run(prepared)).embeddings

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens queries have together, without those that are cut."""
        return len(
            self._prepare(listed(texts), self.spec.query_prompt, low_latency=True).tokens.ids
        )

    def prepare(self, texts: Sequence[str]) -> PreparedWindow:
        """Tokenise a window of documents and start its copy to the device.

        ``prepare``, ``run`` and ``collect`` may overlap for different windows, in one thread each.
        """
        return self._prepare(listed(texts), self.spec.document_prompt, low_latency=False)

    def run(
        self,
        prepared: PreparedWindow,
        *,
        advance: Callable[[int], None] | None = None,
        stopped: Callable[[NDArray[np.float32]], None] | None = None,
    ) -> RanWindow:
        """Encode a prepared window; on a GPU this returns before the embeddings are there.

        A run that Ctrl-C stops gives ``stopped`` what may be ``known`` to another one.
        """
        if prepared.ready is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(prepared.ready)
            for tensor in (prepared.ids, prepared.offsets):
                tensor.record_stream(here)
        share = len(prepared.tokens.ids) // self._threads.count
        little = share <= _TOKENS_WORTH_A_THREAD
        alone = little and prepared.low_latency
        split = not little and self._threads.count > 1
        # Several batches a thread, so that none is idle for long at the end and little is padded.
        most = max(share // _BATCHES_A_THREAD, _TOKENS_OF_A_BATCH) if split else None
        batches = Batches(prepared, self._transformer, dim=self.dim, most=most)
        # Repeated texts count with the first batch.
        repeated = iter([len(prepared.texts) - len(batches.embeddings)])

        def advance_all(rows: int) -> None:
            if advance is not None:
                advance(rows + next(repeated, 0))

        try:
            if len(prepared.known):
                advance_all(len(prepared.known))
            self._threads.run(batches.step, advance_all, alone=alone)
        except KeyboardInterrupt:
            if stopped is not None and len(found := batches.finished()):
                stopped(found)
            raise
        counts = batches.padded_tokens, batches.out_of_memory
        if self.device.type != "cuda":
            return RanWindow(prepared, batches.embeddings.cpu(), *counts)
        host, arrived, stream = self._to_host(batches.embeddings)
        kept = _OnDevice(batches.embeddings, host, prepared.tokens.places, stream)
        return RanWindow(prepared, host, *counts, arrived, kept)

    def collect(self, ran: RanWindow) -> Encoded:
        """Return the embeddings of a window in the order of its texts."""
        if ran.arrived is not None:
            ran.arrived.synchronize()
        tokens, first = ran.prepared.tokens, len(ran.prepared.known)
        distinct: NDArray[np.float32] = ran.embeddings.numpy()
        finite = np.asarray(np.isfinite(distinct).all(axis=1))
        if not finite.all():
            broken = int(np.argmin(finite[tokens.places]))
            raise EncoderError(
                f"model {self.spec.model} in {self.spec.dtype} gives NaN or infinity for "
                f"{ran.prepared.texts[broken][:60]!r}; use "
                f"{'another model' if self.spec.dtype == 'float32' else '--dtype float32'}"
            )
        return Encoded(
            embeddings=distinct[tokens.places],
            truncated=tokens.truncated,
            known=int((tokens.places < first).sum()),
            tokens=len(tokens.ids) - int(tokens.offsets[first]),
            padded_tokens=ran.padded_tokens,
            distinct=len(distinct),
            moments=None if ran.on_device is None else ran.on_device.moments,
        )

    def _prepare(self, texts: Sequence[str], prompt: str, *, low_latency: bool) -> PreparedWindow:
        prompted = [prompt + text for text in texts]
        lowered = [text.lower() for text in prompted] if self.spec.lower_case else prompted
        tokenizer = self._transformer.tokenizer
        tokens = tokenize(tokenizer, lowered, max_length=self.spec.max_length)
        require_known_tokens(tokens, self.spec, self._transformer.vocabulary)
        (ids, offsets), ready = self._to_device(tokens.ids, tokens.offsets)
        unpooled = self._unpooled[prompt]
        return PreparedWindow(texts, tokens, ids, offsets, unpooled, low_latency, ready)

    def _to_device(self, *arrays: NDArray[Any]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Start copying arrays to the device; the event marks the end."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if self.device.type != "cuda":
            return [tensor.to(self.device) for tensor in tensors], None
        # From pinned memory, on another stream, next to the kernels of the window before.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            there = [t.pin_memory().to(self.device, non_blocking=True) for t in tensors]
        return there, stream.record_event()

    def _to_host(self, embeddings: Tensor) -> tuple[Tensor, torch.cuda.Event, torch.cuda.Stream]:
        """Start copying embeddings to the host; the event marks the end."""
        host = torch.empty(embeddings.shape, dtype=embeddings.dtype, pin_memory=True)
        # On another stream, it waits for the kernels of this window only.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host.copy_(embeddings, non_blocking=True)
            embeddings.record_stream(stream)
        return host, stream.record_event(), stream


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


_BLOCK_ROWS = 8192


@torch.inference_mode()
def _moments_on_device(rows: Tensor) -> Moments:
    """Return ``Moments.of`` rows (n, d), computed on their device in another order."""
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
    # A general product does not promise to be symmetric to the bit.
    sums = (point, first, (second + second.T) / 2, third)
    point_, first_, second_, third_ = (each.cpu().numpy() for each in sums)
    return Moments.from_sums(
        point_, count=float(n), first=first_, second=second_, third=third_, fourth=float(fourth)
    )
