"""Embeddings by a model's ONNX file: those of torch but for rounding, without torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from tests.helpers import tiny_models
from tests.helpers.builds import build_texts
from whiten_index import load_encoder, open_index
from whiten_index.errors import ArtifactError, ConfigError, EncoderError, StorageError

ODD = ["", "x", "the cat " * 300, "東京"]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from whiten_index.cli import main
main()
"""


class States(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return found.last_hidden_state


def export(folder: Path, to: Path) -> None:
    """Write the ONNX file of a folder's model, as exporters do."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids, mask = torch.ones(2, 2, 8, dtype=torch.int64)
    mask[1, 4:] = 0
    names, axes = ["input_ids", "attention_mask", "last_hidden_state"], {0: "texts", 1: "tokens"}
    to.parent.mkdir(exist_ok=True)
    # The older exporter, which published files are by, takes a tenth of the time.
    torch.onnx.export(
        States(model).eval(), (ids, mask), to, input_names=names[:2], output_names=names[2:],
        dynamo=False, dynamic_axes=dict.fromkeys(names, axes),
    )  # fmt: skip


def graph_of(file: Path, change: Callable[[np.ndarray], np.ndarray]) -> onnx.ModelProto:
    """Return what a file holds, with other embeddings of words."""
    graph = onnx.load(file)
    (words,) = (each for each in graph.graph.initializer if "word_embeddings" in each.name)
    changed = change(onnx.numpy_helper.to_array(words))
    words.CopyFrom(onnx.numpy_helper.from_array(changed, words.name))
    return graph


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.bert(tmp_path_factory.mktemp("onnx") / "model")
    export(folder, folder / "onnx/model.onnx")
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return tiny_models.copied(plain, tmp_path / "model")


@pytest.mark.parametrize(
    "pooling", ["mean", "cls", "max", "last", "weightedmean", "mean_sqrt_len_tokens"]
)
def test_an_onnx_file_gives_what_torch_gives(plain: Path, pooling: Any) -> None:
    some = [*tiny_models.texts(), *ODD]
    options: dict[str, Any] = {"pooling": pooling, "document_prompt": "passage ", "max_length": 40}
    ours = load_encoder(str(plain), backend="onnx", **options)
    expected = load_encoder(str(plain), device="cpu", **options)
    np.testing.assert_allclose(ours.encode(some), expected.encode(some), atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(
        ours.encode_queries(some), expected.encode_queries(some), atol=1e-5, rtol=1e-4
    )
    assert ours.count_tokens(some) == expected.count_tokens(some)
    assert ours.spec == expected.spec
    cut = [encoder.encode_window(some).truncated for encoder in (ours, expected)]
    assert (cut[0] == cut[1]).all()


def test_an_onnx_file_behind_a_link_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "onnx").rename(tmp_path / "elsewhere")
    (folder / "onnx").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EncoderError, match="onnx links to a folder"):
        load_encoder(str(folder), backend="onnx")


def build(folder: Path, model: Path, **options: Any) -> Path:
    texts = [
        f"the {a} {b} {row}" for row in range(20) for a in ("cat", "dog") for b in ("ran", "a")
    ]
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet")
    options = {"factory": "Flat", **options}
    return build_texts(folder / "index", folder / "c.parquet", model, **options).out


def test_an_index_is_searched_and_built_where_torch_is_not_installed(
    folder: Path, tmp_path: Path
) -> None:
    index = build(tmp_path, folder)

    def run(*arguments: Any) -> str:
        command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stderr
        return found.stdout

    with_torch = open_index(index).search(["the dog ran 3"])[0]
    found = json.loads(run("search", index, "the dog ran 3", "--json"))["results"][0]["hits"]
    assert [hit["id"] for hit in found] == [hit.id for hit in with_torch]
    new = ["build", tmp_path / "c.parquet", "--text-column", "text", "--model", folder]
    run(*new, "--whiten", "whitening", "--k", "8", "--out", tmp_path / "other")
    assert open_index(tmp_path / "other").search(["the dog ran 3"])[0][0].id == with_torch[0].id


def test_a_file_of_other_weights_is_noticed(folder: Path, tmp_path: Path) -> None:
    index, graph = build(tmp_path, folder), graph_of(folder / "onnx/model.onnx", lambda x: -x)
    (folder / "onnx/model.onnx").unlink()
    with pytest.raises(EncoderError, match=r"has no onnx/model\.onnx"):
        open_index(index, backend="onnx").search(["the cat"])
    onnx.save(graph, folder / "onnx/model.onnx")
    with pytest.raises(EncoderError, match="has changed: the cosine of one of twelve"):
        open_index(index, backend="onnx").search(["the cat"])


def test_memory_that_runs_out_is_no_fault_of_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it a text that the model cannot take, whose recorded embedding would be zeros."""
    encoder = load_encoder(str(folder), backend="onnx")
    expected, real, most = encoder.encode(ODD), onnxruntime.InferenceSession.run, 1
    full = Fail("[ONNXRuntimeError] : 1 : FAIL : Failed to allocate memory for requested buffer")

    def run(self: Any, outputs: Any, inputs: Any) -> Any:
        if len(inputs["input_ids"]) > most:
            raise full
        return real(self, outputs, inputs)

    monkeypatch.setattr("onnxruntime.InferenceSession.run", run)
    np.testing.assert_allclose(encoder.encode(ODD), expected, atol=1e-6)
    most = 0
    with pytest.raises(StorageError, match="does not fit into the memory of cpu, which is out of"):
        encoder.encode(ODD)
    with pytest.raises(StorageError, match="out of memory"):
        build(tmp_path, folder, backend="onnx")
    monkeypatch.setattr("onnxruntime.InferenceSession", Mock(side_effect=full))
    with pytest.raises(StorageError, match=r"cannot read .*model\.onnx: out of memory"):
        load_encoder(str(folder), backend="onnx")


_KEY = b"\n\x08location"


def _length(name: str) -> bytes:
    return bytes([len(name)] if len(name) < 128 else [len(name) & 127 | 128, len(name) >> 7])


@pytest.mark.parametrize("name", ["model.onnx_data", "weights.bin", "w" * 200 + ".bin"])
def test_tensors_next_to_an_onnx_file_may_be_written_over_later(folder: Path, name: str) -> None:
    file = folder / "onnx/model.onnx"
    expected = load_encoder(str(folder), backend="onnx").encode(ODD)
    graph = onnx.load(file)
    onnx.save_model(graph, file, save_as_external_data=True, location=name, size_threshold=0)
    encoder = load_encoder(str(folder), backend="onnx")
    np.testing.assert_array_equal(encoder.encode(ODD), expected)
    tensors = folder / "onnx" / name
    with tensors.open("r+b") as opened:
        opened.write(bytes(tensors.stat().st_size))
    np.testing.assert_array_equal(encoder.encode(ODD), expected)
    # Fields may come in any order, of which this one is not looked for.
    content, named = file.read_bytes(), b"\x12" + _length(name) + name.encode()
    file.write_bytes(content.replace(_KEY + named, named + _KEY))
    with pytest.raises(EncoderError, match="in a way that is not known"):
        load_encoder(str(folder), backend="onnx")
    file.write_bytes(content)
    # As of a copy that was cut off: it would fill the memory.
    os.truncate(tensors, 1 << 40)
    with pytest.raises(ArtifactError, match=r"has 1,099,511,627,776 bytes, of which"):
        load_encoder(str(folder), backend="onnx")


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"layers": (1,)}, r"is to give layers \(1,\)"),
        ({"dtype": "bfloat16"}, "is to compute in bfloat16"),
        ({"device": "cuda"}, "not on cuda"),
    ],
)
def test_what_an_onnx_file_cannot_do(plain: Path, option: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_encoder(str(plain), backend="onnx", **option)


@pytest.mark.parametrize("content", [b"", b"junk" * 100])
def test_a_damaged_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "onnx/model.onnx").write_bytes(content)
    with pytest.raises(EncoderError, match=r"model\.onnx cannot be loaded"):
        load_encoder(str(folder), backend="onnx")


def test_a_file_that_cannot_be_run_spoils_no_store(
    folder: Path, tmp_path: Path, capfd: Any
) -> None:
    graph = graph_of(folder / "onnx/model.onnx", lambda x: x[:1] * 0)
    for node in graph.graph.node:
        node.name = "\x1b[2J" + node.name
    shutil.copytree(folder, tmp_path / "broken")
    onnx.save(graph, tmp_path / "broken/onnx/model.onnx")
    store = {"store": str(tmp_path / "store")}
    with pytest.raises(EncoderError, match=r"ONNX file .* cannot be run"):
        build(tmp_path, tmp_path / "broken", backend="onnx", **store)
    assert "\x1b" not in capfd.readouterr().err
    index = build(tmp_path, folder, **store)
    with pytest.raises(EncoderError, match="or the file gives none"):
        open_index(index, backend="onnx", model=str(tmp_path / "broken")).search(["the cat"])


def test_a_pipe_in_the_place_of_the_file_is_refused(folder: Path) -> None:
    (folder / "onnx/model.onnx").unlink()
    os.mkfifo(folder / "onnx/model.onnx")
    with pytest.raises(ArtifactError, match=r"model\.onnx .* where a file is needed"):
        load_encoder(str(folder), backend="onnx")


def test_a_file_that_nothing_is_known_to_compare_with_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    rows = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)
    pq.write_table(pa.table({"vector": list(rows)}), tmp_path / "c.parquet")
    options = {"embedding_column": "vector", "text_columns": (), "factory": "Flat"}
    index = build_texts(tmp_path / "index", tmp_path / "c.parquet", folder, **options).out
    assert len(open_index(index).search(["the cat"])[0]) == 10
    with pytest.raises(EncoderError, match="keeps no embeddings to compare the ONNX file"):
        open_index(index, backend="onnx").search(["the cat"])


def test_a_prompt_that_leaves_no_room_is_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match="leaves no room in the 8 of a text"):
        load_encoder(str(plain), backend="onnx", max_length=8, query_prompt="the cat " * 8)
