"""Encoding on a CPU next to sentence-transformers and OpenVINO, and the speed of matrix products.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.processors NAME [MODEL]``; NAME is that of the
processor's instructions in the results. It needs ``pip install openvino``. One process on an idle
machine; every contender encodes the same texts in each round, and ratios are within a round.
OpenVINO gets batches of 32 of like length, padded, from a model that torch exports.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.encoding_inputs import MAX_LENGTH
from benchmarks.encoding_peers import Setting, load_ours, load_peer
from benchmarks.results_file import data_folder, write
from whiten_index.encoding.encoder_config import DEFAULT_MODEL
from whiten_index.encoding.models import find_model

_SENTENCES, _ABSTRACTS, _ROUNDS, _QUERIES = 1_500, 150, 3, 100
_SIZE, _TIMES = 2_048, 6
_PEER = "sentence-transformers, float32"
_QUERY = "How do antibodies bind to the surface of a virus?"

Encode = Callable[[list[str]], NDArray[np.float32]]


def main(name: str, model: str = DEFAULT_MODEL) -> None:
    """Measure all contenders on this machine and write the results."""
    model = str(find_model(model).path)
    found: list[dict[str, Any]] = [{"figure": "product", **row} for row in products()]
    encode, answer = contenders(model)
    seconds: dict[tuple[str, str], list[float]] = {}
    embeddings: dict[tuple[str, str], NDArray[np.float32]] = {}
    for texts in texts_of().values():
        for each in encode.values():
            each(texts[:64])
    for _ in range(_ROUNDS):
        for kind, texts in texts_of().items():
            for who, each in encode.items():
                started = time.perf_counter()
                embeddings[who, kind] = each(texts)
                taken = time.perf_counter() - started
                seconds.setdefault((who, kind), []).append(taken)
                print(f"{who}, {kind}: {len(texts) / taken:.1f}/s", file=sys.stderr, flush=True)
    for (who, kind), all_taken in seconds.items():
        pairs = zip(seconds[_PEER, kind], all_taken, strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        found.append(
            {
                "figure": "encoding",
                "contender": who,
                "texts": kind,
                "per_second": len(embeddings[who, kind]) / statistics.median(all_taken),
                "speed": statistics.median(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
                "neighbours": neighbours(embeddings[who, kind], embeddings[_PEER, kind]),
            }
        )
    found += [{"figure": "query", "contender": who, **latency(answer[who])} for who in answer]
    setup = {"figure": "setup", "threads": torch.get_num_threads(), "instructions": name}
    print(write(f"processors_{name}", [setup, *found]))


def texts_of() -> dict[str, list[str]]:
    """Return sentences of Wikipedia, and titles with abstracts of SciFact."""
    rng = np.random.default_rng(0)
    sentences = pq.read_table(data_folder() / "sentences/wikipedia_en.parquet")["text"].to_pylist()
    documents = pq.read_table(data_folder() / "retrieval/scifact/corpus.parquet")
    columns = (documents[name].to_pylist() for name in ("title", "text"))
    abstracts = [" ".join(pair) for pair in zip(*columns, strict=True)]
    return {
        "sentences": [sentences[i] for i in rng.permutation(len(sentences))[:_SENTENCES]],
        "abstracts": [abstracts[i] for i in rng.permutation(len(abstracts))[:_ABSTRACTS]],
    }


def contenders(model: str) -> tuple[dict[str, Encode], dict[str, Encode]]:
    """Return who encodes documents, and who encodes queries, by name."""
    peer = load_peer(Setting(model, "cpu", "float32"))
    encode: dict[str, Encode] = {
        _PEER: lambda texts: np.asarray(peer.encode(texts, show_progress_bar=False))
    }
    answer = dict(encode)
    for dtype in ("float32", "bfloat16"):
        setting = Setting(model, "cpu", dtype)
        for each in (load_ours(setting), load_ours(setting, backend="openvino")):
            name = f"ours, {dtype}, products of {each.runtime['products']}"
            encode[name], answer[name] = each.encode, each.encode_queries
    compiled = openvino(model)
    return encode | compiled, answer | compiled


def openvino(folder: str) -> dict[str, Encode]:
    """Return OpenVINO's encoders, by the precision of their products."""
    library = importlib.import_module("openvino")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids, mask = (torch.ones(4, 16, dtype=torch.long) for _ in range(2))
    rows, width = torch.export.Dim("rows", max=4096), torch.export.Dim("width", min=2, max=512)
    shapes = ({0: rows, 1: width}, {0: rows, 1: width})
    exported = torch.export.export(_Pooled(model), (ids, mask), dynamic_shapes=shapes)
    converted = library.convert_model(exported)

    def encoder(precision: str) -> Encode:
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
        }
        compiled = library.Core().compile_model(converted, "CPU", options)

        def encode(texts: list[str]) -> NDArray[np.float32]:
            order = np.argsort([-len(text) for text in texts], kind="stable")
            out = np.empty((len(texts), model.config.hidden_size), dtype=np.float32)
            for start in range(0, len(order), 32):
                some = order[start : start + 32]
                tokens = tokenizer(
                    [texts[i] for i in some],
                    padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="np",
                )  # fmt: skip
                out[some] = compiled([tokens["input_ids"], tokens["attention_mask"]])[0]
            return out

        return encode

    capable = library.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    names = {"float32": "f32"} | ({"bfloat16": "bf16"} if "BF16" in capable else {})
    return {f"OpenVINO, {name}": encoder(hint) for name, hint in names.items()}


class _Pooled(nn.Module):
    """A Transformer and the mean of its states: (n, t), (n, t) to (n, d)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the tokens of a mask."""
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).float()
        return (states * weight).sum(1) / weight.sum(1).clamp(min=1)


def products() -> list[dict[str, Any]]:
    """Return the floating-point operations a second of square products, by library and dtype."""
    a, b = (torch.randn(_SIZE, _SIZE) for _ in range(2))
    half = a.bfloat16(), b.bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(b, _SIZE)
    pointwise = torch.ops.mkldnn._linear_pointwise
    ways: dict[tuple[str, str], Callable[[], Any]] = {
        ("torch", "float32"): lambda: a @ b,
        ("numpy", "float32"): lambda: a.numpy() @ b.numpy(),
        ("oneDNN", "float32"): lambda: pointwise(a, packed, None, "none", [], "none"),
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        ways["torch", "bfloat16"] = lambda: half[0] @ half[1]
    found = []
    for (library, dtype), way in ways.items():
        best = min(_seconds(way) for _ in range(_TIMES))
        found.append({"library": library, "dtype": dtype, "flops": 2 * _SIZE**3 / best})
    return found


def neighbours(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the mean share of the ten nearest by cosine that both have."""
    nearest = []
    for each in (found, expected):
        unit = each / np.linalg.norm(each, axis=1, keepdims=True)
        scores = unit @ unit.T
        np.fill_diagonal(scores, -2)
        nearest.append(np.argsort(-scores, axis=1, kind="stable")[:, :10])
    pairs = zip(*nearest, strict=True)
    return float(np.mean([len(set(one) & set(two)) / 10 for one, two in pairs]))


def latency(encode: Encode) -> dict[str, float]:
    """Return the milliseconds of one query, the median and the 99th percentile."""
    taken = sorted(1e3 * _seconds(lambda: encode([_QUERY])) for _ in range(_QUERIES))
    return {"p50": statistics.median(taken), "p99": taken[round(0.99 * _QUERIES) - 1]}


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _arguments(given: Sequence[str]) -> Sequence[str]:
    if not 1 <= len(given) <= 2:
        raise SystemExit(__doc__)
    return given


if __name__ == "__main__":
    main(*_arguments(sys.argv[1:]))
