"""The encoder: texts in, pooled and unnormalised embeddings out."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from whiten_index.encoding.batching import BatchEncoder, Batches
from whiten_index.encoding.encoder_config import BackendName, EncoderConfig, chosen_devices
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.openvino import OpenVinoStates
from whiten_index.encoding.pooling import mean_layers, pool
from whiten_index.encoding.products import TORCH, has_bfloat16, use_fastest_products
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.transformer import LayerStates, load_head, load_transformer
from whiten_index.encoding.window_encoder import TextWindow
from whiten_index.errors import ConfigError

# Below this, one batch on all cores answers a query sooner than one batch a core.
_TOKENS_WORTH_A_THREAD = 128
_BATCHES_A_THREAD = 2
# Smaller ones multiply small matrices: 64 queries of 17 tokens took 1.17 times as long in batches
# of 133 (2 cores).
_TOKENS_OF_A_BATCH = 256
# Matrix products of so many rows give each row the same bits as those of any more. Measured with
# MKL and oneDNN on x86, one thread: from 16 rows on with AVX-512, from 4 with AVX2. ARM and
# Accelerate are untried.
_FEWEST_ROWS = 64
# From 512 to 4,096 on a CPU the speed differs by 1 % (MiniLM, one thread), and small batches leave
# more that Ctrl-C can keep.
_BATCH_TOKENS_CPU, _BATCH_TOKENS_GPU = 512, 131_072
_MOST_THREADS = 16


class Encoder(BatchEncoder):
    """A Transformer or a static model, with its tokenizer, pooling and device.

    Attributes:
        spec: identity of the encoder.
        device: device that it runs on.

    Examples:
        >>> encoder = load_encoder("all-MiniLM-L6-v2", pooling="mean")
        >>> encoder.encode(["A cat sat on the mat."]).shape
        (1, 384)
    """

    _products, _inputs, _fewest_rows = TORCH, "padded", 0

    def __init__(self, spec: EncoderSpec, folder: ModelFolder, config: EncoderConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        # A job on several devices has one encoder for each of them.
        self.device = _device(chosen_devices(config.device)[0])
        head = load_head(folder)
        self._head = None if head is None else head.to(self.device)
        super().__init__(spec, self._load_model(spec, folder, config.backend))
        # OpenVINO gives a batch all cores.
        self._threads = InferenceThreads(self.device, config.threads, alone=not self.pads)

    def _load_model(self, spec: EncoderSpec, folder: ModelFolder, backend: BackendName) -> Any:
        on_cpu = self.device.type == "cpu"
        if backend == "openvino" and not on_cpu:
            raise ConfigError(
                f"--backend openvino is for CPUs, and the device is {self.device}; add --device "
                "cpu, or use --backend torch"
            )
        tokenizer, model = load_transformer(spec, folder, self.device)
        self._pad = int(tokenizer.pad_token_id or 0)
        self.vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
        only_last = spec.layers == (folder.layers,)
        states = LayerStates(model, None if only_last else spec.layers)
        self._states: Callable[..., list[Tensor]] = states
        self.batch_tokens = _BATCH_TOKENS_CPU if on_cpu else _BATCH_TOKENS_GPU
        if backend == "openvino":
            vocabulary = self.vocabulary or model.config.vocab_size
            compiled = OpenVinoStates(states, spec.dtype, vocabulary, spec.max_length)
            self._states, self.pads = compiled, False
            self.batch_tokens *= min(
                torch.get_num_threads(), _MOST_THREADS
            )  # a batch has all threads
            self._products = f"OpenVINO {compiled.dtype}"
        elif on_cpu:
            self._products = use_fastest_products(model, spec.dtype, last=only_last)
            # With padding, and by a GPU's kernels, a text depends on its batch.
            self._fewest_rows = _FEWEST_ROWS
        if on_cpu:
            self.shortest, self._inputs = 1.0, "of one length"
        return tokenizer

    def __repr__(self) -> str:
        return f"Encoder({self.spec.model!r}, {self.spec.dim} dims, {self.device})"

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of the libraries, the form of inputs, and the products."""
        own = () if self.pads else ("openvino",)
        versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", *own)}
        return {**versions, "inputs": self._inputs, "products": self._products}

    @property
    def note(self) -> str | None:
        """Note on a faster type, or on one that is not used here; None without any."""
        dtype, on_cpu = self.spec.dtype, self.device.type == "cpu"
        if dtype == "float32" and on_cpu and has_bfloat16():
            return (
                "note: --dtype bfloat16 encodes 1.5 to 3 times as fast on this processor and keeps "
                "99.4 to 99.9 % of the ten nearest (MiniLM); it encodes all rows again"
            )
        if dtype == "bfloat16" and on_cpu and not self._products.endswith(dtype):
            return "note: this model is encoded in float32 on this machine, not in bfloat16"
        return None

    def host(self, embeddings: Tensor) -> NDArray[np.float32]:
        """Return embeddings as an array."""
        return embeddings.cpu().numpy()

    def ran(self, batches: Batches) -> Batches:
        """Return batches that are done; on a GPU, before the embeddings are here."""
        there = batches.embeddings
        if self.device.type != "cuda":
            batches.embeddings = self.host(there)
            return batches
        host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        # On another stream, the copy waits for the kernels of this window only.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host.copy_(there, non_blocking=True)
            there.record_stream(stream)
        batches.embeddings, batches.arrived = host.numpy(), stream.record_event().synchronize
        return batches

    def window(self, texts: Sequence[str], *, queries: bool) -> TextWindow:
        """Tokenise texts and start the copy of the tokens to the device."""
        window = super().window(texts, queries=queries)
        assert window.tokens is not None
        inputs = [self._to_device(each) for each in (window.tokens.ids, window.tokens.offsets)]
        return replace(window, inputs=inputs)

    def room(self, window: TextWindow, count: int) -> Tensor:
        """Return a tensor for embeddings (count, d) on the device, with those that are known."""
        room = torch.empty((count, self.dim), dtype=torch.float32, device=self.device)
        room[: len(window.known)] = torch.tensor(window.known).view(-1, self.dim)
        return room

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        # From pinned memory, a copy does not wait for the kernels of the window before.
        pinned = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return pinned.to(self.device, non_blocking=pinned is not tensor)

    def _drive(self, batches: Batches, advance: Callable[[int], None]) -> None:
        share = int(batches.lengths.sum()) // self._threads.count
        little = share <= _TOKENS_WORTH_A_THREAD
        if not little and self._threads.count > 1:
            # Several batches a thread, so that none is idle for long at the end and little is
            # padded.
            batches.most = max(share // _BATCHES_A_THREAD, _TOKENS_OF_A_BATCH)
        self._threads.run(batches.step, advance, alone=little and batches.window.queries)

    @staticmethod
    def tokens_of(window: TextWindow, rows: slice) -> tuple[Tensor, Tensor]:
        """Return token ids (T,) of some texts, end to end, and their bounds (n + 1,)."""
        assert window.tokens is not None
        ids, offsets = window.inputs
        start, stop = (int(window.tokens.offsets[row]) for row in (rows.start, rows.stop))
        return ids[start:stop], offsets[rows.start : rows.stop + 1] - start

    @torch.inference_mode()
    def embed(self, window: TextWindow, rows: slice) -> Tensor:
        """Return the embeddings of some of the different texts, as one batch.

        Where they would depend on the other texts, a batch is filled up with more tokens.
        """
        assert window.tokens is not None
        ids, offsets = self.tokens_of(window, rows)
        lengths = window.tokens.lengths[rows]
        longest, shortest = int(lengths[0]), int(lengths[-1])
        if longest > shortest:
            mask = torch.arange(longest, device=ids.device) < offsets.diff().unsqueeze(1)
            padded = torch.full(mask.shape, self._pad, device=ids.device)
            # Filling by the mask as an index would wait for the device.
            return self.padded(padded.masked_scatter_(mask, ids.long()), mask.long())
        equal, count = ids.long().view(-1, longest), len(lengths)
        if not window.queries and len(ids) < self._fewest_rows:
            equal = equal.repeat(-(-self._fewest_rows // len(ids)), 1)
        return self.padded(equal, None)[:count]

    def padded(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return (n, d) float32 of token ids (n, t) padded on the right, if there is a mask."""
        states = self._states(input_ids=ids, attention_mask=mask)
        return self.pooled(states, torch.ones_like(ids) if mask is None else mask)

    def pooled(self, states: Sequence[Tensor], mask: Tensor) -> Tensor:
        """Return (n, d) float32 of the states (n, t, d) of each layer."""
        pooled = pool(mean_layers(states), mask, self.spec.pooling)
        if self._head is None:
            return pooled
        rows = pad(pooled, (0, 0, 0, max(self._fewest_rows - len(pooled), 0)))
        embeddings: Tensor = self._head(rows)[: len(pooled)]
        return embeddings


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


class InferenceThreads:
    """Threads that encode batches: several on a CPU, the caller's on a device.

    Two batches at once on one core each take 7 to 13 % less time than one batch at a time on two
    cores (MiniLM, 2 cores): no core waits for the others after every matrix product.
    """

    def __init__(self, device: torch.device, threads: int | None, *, alone: bool = False) -> None:
        """Start them, of ``threads`` or torch's own number; ``alone``: one batch at a time."""
        on_cpu = device.type == "cpu"
        self._callers = threads if on_cpu else None
        threads = threads or torch.get_num_threads()
        # The number of workers, 8 to 16 where possible, that leaves the fewest cores over.
        most = min(threads, _MOST_THREADS)
        counts = range((most + 1) // 2, most + 1) if on_cpu and not alone else [1]
        self.count = max(counts, key=lambda count: (count * (threads // count), count))
        self._pool: ThreadPoolExecutor | None = None
        if self.count > 1:
            # Every thread starts now, since each changes torch's default for later threads, which
            # is then set back.
            before, barrier = torch.get_num_threads(), threading.Barrier(self.count + 1)
            self._pool = ThreadPoolExecutor(self.count, "encode")
            for _ in range(self.count):
                self._pool.submit(_take_threads, threads // self.count, barrier)
            barrier.wait()
            torch.set_num_threads(before)

    def run(
        self, step: Callable[[], int | None], advance: Callable[[int], None], *, alone: bool = False
    ) -> None:
        """Call ``step`` until it returns None; ``advance`` gets each result in this thread.

        An exception of ``advance`` stops the threads. With ``alone``, the caller's thread does all
        steps with all cores.
        """
        if alone or self._pool is None:
            if self._callers is not None:
                torch.set_num_threads(self._callers)
            while (rows := step()) is not None:
                advance(rows)
            return
        # Two for each thread, so that none waits for the next one.
        steps = {self._pool.submit(step) for _ in range(2 * self.count)}
        try:
            while steps:
                done, steps = wait(steps, return_when=FIRST_COMPLETED)
                for each in done:
                    if (rows := each.result()) is not None:
                        steps.add(self._pool.submit(step))
                        advance(rows)
        finally:
            wait({each for each in steps if not each.cancel()})


def _take_threads(count: int, barrier: threading.Barrier) -> None:
    torch.set_num_threads(count)
    # torch fixes a thread's number when the thread first asks for it.
    torch.get_num_threads()
    barrier.wait()
