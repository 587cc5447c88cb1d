"""Models that sentence-transformers runs: folders with modules that are not run here."""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from tests.helpers import tiny_models
from tests.helpers.bad_input import run
from whiten_index import (
    BuildConfig,
    TrainingConfig,
    build_index,
    load_encoder,
    open_index,
    train_encoder,
)
from whiten_index.errors import ConfigError, EncoderError

st = pytest.importorskip("sentence_transformers")
TEXTS = ["the cat sat on the mat", "a dog ran", "the queen walks and sang", "a dog ran", "x"]


def saved(folder: Path, kind: str) -> Path:
    """Save a model with a convolution, or with modules each for queries and documents."""
    return Path(shutil.copytree(f"{_saved_once(kind).name}/model", folder / "model"))


@functools.cache
def _saved_once(kind: str) -> tempfile.TemporaryDirectory[str]:
    from sentence_transformers.models import CNN, Dense, Normalize, Pooling, Router, Transformer

    made = tempfile.TemporaryDirectory()
    folder = Path(made.name)
    transformer = Transformer(str(tiny_models.bert(folder / "bert")))
    if kind == "cnn":
        steps = [transformer, CNN(tiny_models.DIM, 8), Pooling(24), Normalize()]
    elif kind == "router first":
        halves = [
            [transformer, Pooling(tiny_models.DIM, pooling_mode=each)] for each in ("cls", "max")
        ]
        steps = [Router.for_query_document(*halves)]
    else:
        halves = [[Dense(tiny_models.DIM, 16)], [Dense(tiny_models.DIM, 16)]]
        steps = [transformer, Pooling(tiny_models.DIM), Router.for_query_document(*halves)]
    model = st.SentenceTransformer(modules=steps, prompts={"query": "query ", "document": ""})
    model.save(str(folder / "model"))
    return made


def truth(folder: Path, texts: list[str], *, queries: bool) -> np.ndarray:
    model = st.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    found = (model.encode_query if queries else model.encode_document)(texts)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def load(folder: Path, **options: Any) -> Any:
    return load_encoder(str(folder), trust_remote_code=True, device="cpu", **options)


def assert_alike(embeddings: np.ndarray, folder: Path, *, queries: bool = False) -> None:
    """They are those that sentence-transformers gives, but for their lengths."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, truth(folder, TEXTS, queries=queries), atol=1e-5)


def edit_module(folder: Path, **changes: str) -> None:
    """Change what ``modules.json`` says of the second module."""
    modules = json.loads((folder / "modules.json").read_text())
    modules[1].update(changes)
    tiny_models.write_json(folder / "modules.json", modules)


@pytest.mark.parametrize("kind", ["cnn", "router", "router first"])
def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path, kind)
    encoder = load(folder)
    documents, queries = encoder.encode(TEXTS), encoder.encode_queries(TEXTS)
    assert_alike(documents, folder)
    assert_alike(queries, folder, queries=True)
    # A normalisation at the end is left out, as of every model.
    assert not np.allclose(np.linalg.norm(documents, axis=1), 1, atol=1e-3)
    assert (documents[1] == documents[3]).all()


def test_weights_that_attention_would_hide_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "cnn")
    path = next(folder.rglob("model.safetensors"))
    weights = {name: each.clone() for name, each in load_file(path).items()}
    weights["encoder.layer.1.attention.self.key.weight"][0, 0] = float("nan")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(EncoderError, match="has weights that are not finite"):
        load(folder)


_STEPS = """
import torch

class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "isfinite" in str(function):
            raise NotImplementedError(function)
        return super().__torch_function__(function, types, args, kwargs or {})

class Mixing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("weight", torch.nn.Parameter(MAKE, requires_grad=False))

    def forward(self, features):
        states = features["sentence_embedding"]
        features["sentence_embedding"] = (self.weight @ states.T).as_subclass(torch.Tensor).T
        return features

    @classmethod
    def load(cls, *_, **__):
        return cls()
"""


@pytest.mark.parametrize("made", ["{}.to_sparse()", "{}.as_subclass(Own)"])
def test_weights_of_other_kinds_of_tensors_are_not_asked(tmp_path: Path, made: str) -> None:
    """Those of torchao are tensors of a class of their own, and cannot say what is finite."""
    folder = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"))
    weight = made.format("torch.diag(torch.arange(32.0))")
    (folder / "steps.py").write_text(_STEPS.replace("MAKE", weight))
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Mixing", "type": "steps.Mixing"})
    tiny_models.write_json(folder / "modules.json", modules)
    (folder / "2_Mixing").mkdir()
    assert_alike(load(folder).encode(TEXTS), folder)


def test_memory_that_runs_out_halves_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(saved(tmp_path, "router"))
    expected, own = encoder.encode(TEXTS), st.SentenceTransformer.encode_document

    def starved(self: Any, texts: list[str], **options: Any) -> Any:
        if len(texts) > 1:
            raise RuntimeError("CUDA out of memory")
        return own(self, texts, **options)

    monkeypatch.setattr(st.SentenceTransformer, "encode_document", starved)
    ran = encoder.run(encoder.prepare(TEXTS))
    np.testing.assert_allclose(encoder.collect(ran).embeddings, expected, atol=1e-5)
    assert ran.out_of_memory == 2


def test_a_text_about_memory_is_no_lack_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load_encoder(str(saved(tmp_path, "router")), trust_remote_code=True, device="cpu")
    refused = Mock(side_effect=ValueError("no rule for 'my phone is out of memory'"))
    monkeypatch.setattr(st.SentenceTransformer, "encode_document", refused)
    with pytest.raises(EncoderError, match=r"cannot encode with .*no rule for 'my phone is out of"):
        encoder.encode(TEXTS)


def write_corpus(folder: Path, rows: int) -> Path:
    texts = [f"the cat {word} {row}" for row in range(rows) for word in ("sat", "ran")][:rows]
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet")
    return folder / "c.parquet"


def test_an_index_is_built_resumed_and_searched_with_consent(tmp_path: Path) -> None:
    folder = saved(tmp_path, "cnn")
    corpus, index = write_corpus(tmp_path, 80), tmp_path / "index"
    command = ("build", corpus, "--text-column", "text", "--model", folder, "--out", index,
               "--whiten", "whitening", "--k", "8", "--device", "cpu")  # fmt: skip
    code, _, err = run(*command)
    assert code == EncoderError.exit_code
    assert "let sentence-transformers run it with --trust-remote-code" in " ".join(err.split())
    code, _, err = run(*command, "--trust-remote-code")
    assert code == 0, err
    assert "sentence-transformers runs this model, since it ends with CNN" in " ".join(err.split())
    write_corpus(tmp_path, 100)
    code, out, err = run(*command, "--trust-remote-code", "--json")
    assert json.loads(out)["counts"]["encoded"] == 20, err
    code, _, err = run("search", index, "the cat sat 1")
    assert (code, "allow it with --trust-remote-code" in " ".join(err.split())) == (4, True)
    hits = open_index(index, trust_remote_code=True).search(["the cat sat 1"])
    assert len(hits[0]) == 10
    # Another setting of the folder is another encoder.
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(settings.read_text().replace('"cosine"', '"dot"'))
    with pytest.raises(EncoderError, match="gives other embeddings"):
        open_index(index, trust_remote_code=True).search(["the cat sat 1"])


@pytest.mark.parametrize(
    "option", [{"pooling": "mean"}, {"layers": (1,)}, {"max_length": 8}, {"dtype": "bfloat16"}]
)
def test_options_of_models_that_are_run_here_are_refused(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"takes no --{next(iter(option)).replace('_', '-')}"):
        load(saved(tmp_path, "cnn"), **option)


def test_what_needs_a_transformer_says_so(tmp_path: Path) -> None:
    corpus, model = str(write_corpus(tmp_path, 20)), str(saved(tmp_path, "cnn"))
    options: dict[str, Any] = {"text_columns": ("text",), "model": model, "trust_remote_code": True}
    out = str(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"training needs a Transformer, and .* is run by"):
        train_encoder(TrainingConfig(corpus=(corpus,), out=out, **options))
    with pytest.raises(ConfigError, match="--passage-tokens needs a Transformer"):
        build_index(BuildConfig(corpus=corpus, out=out, passage_tokens=8, **options))


def test_code_of_the_folder_runs_with_consent_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path, "cnn")
    edit_module(folder, type="steps.Step")
    mark = tmp_path / "mark"
    (folder / "steps.py").write_text(
        "from pathlib import Path\nfrom sentence_transformers.models import CNN\n"
        f"Path({str(mark)!r}).touch()\n\n\nclass Step(CNN):\n    pass\n"
    )
    with pytest.raises(EncoderError, match=r"ends with steps\.Step.*, which is not run here"):
        load_encoder(str(folder))
    assert not mark.exists()
    encoder = load(folder)
    assert mark.exists()
    assert_alike(encoder.encode(TEXTS), folder)


def test_other_code_than_the_recorded_one_never_runs(tmp_path: Path) -> None:
    folder = saved(tmp_path, "cnn")
    index = tmp_path / "index"
    code, _, err = run("build", write_corpus(tmp_path, 30), "--text-column", "text", "--model",
                       folder, "--out", index, "--whiten", "whitening", "--k", "8", "--device",
                       "cpu", "--trust-remote-code")  # fmt: skip
    assert code == 0, err
    mark = tmp_path / "mark"
    edit_module(folder, type="steps.Step")
    (folder / "steps.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    with pytest.raises(EncoderError, match="gives other embeddings"):
        open_index(index, trust_remote_code=True).search(["the cat"])
    assert not mark.exists()


@pytest.mark.parametrize(
    "kind", ["LICENSE.Step", "/elsewhere/steps.Step", "/elsewhere--steps.Step"]
)
def test_code_counts_whatever_its_name_and_none_comes_from_elsewhere(
    tmp_path: Path, kind: str
) -> None:
    folder, mark = saved(tmp_path, "cnn"), tmp_path / "mark"
    edit_module(folder, type=kind.replace("/elsewhere", str(tmp_path)))
    code = tmp_path / "steps.py" if "steps" in kind else folder / "LICENSE.py"
    mark_it = f"from sentence_transformers.models import CNN as Step\nopen({str(mark)!r}, 'w')\n"
    code.write_text(mark_it)
    if "steps" in kind:
        with pytest.raises(EncoderError, match="takes code from another place"):
            load(folder)
        assert not mark.exists()
        return
    before = load(folder).spec.fingerprint
    code.write_text(mark_it + "# changed\n")
    spec = load(folder).spec
    assert mark.exists()
    assert spec.fingerprint != before


@pytest.mark.parametrize("name", ["1_CNN.md", "LICENSE_1", "1_CNN.bin", ".hidden"])
def test_settings_count_whatever_their_folder_is_called(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, "cnn")
    (cnn,) = folder.glob("1_*")
    cnn.rename(folder / name)
    edit_module(folder, path=name)
    if name == ".hidden":
        with pytest.raises(EncoderError, match="outside of it or hidden"):
            load(folder)
        return
    before = load(folder).spec.fingerprint
    (folder / name / "more.json").write_text("{}")
    assert load(folder).spec.fingerprint != before


def test_settings_that_change_in_the_course_of_a_process_count(tmp_path: Path) -> None:
    folder = saved(tmp_path, "cnn")
    before = load(folder).encode(TEXTS)
    (pooling,) = folder.glob("*_Pooling/config.json")
    settings = json.loads(pooling.read_text())
    old = {key: key == "pooling_mode_cls_token" for key in settings if key.startswith("pooling_m")}
    settings.update({**old, **({"pooling_mode": "cls"} if "pooling_mode" in settings else {})})
    tiny_models.write_json(pooling, settings)
    after = load(folder).encode(TEXTS)
    assert not np.allclose(before, after)
    assert_alike(after, folder)


@pytest.mark.parametrize("fault", ["link", "adapter", "code"])
def test_a_folder_that_cannot_be_pinned_is_refused(tmp_path: Path, fault: str) -> None:
    folder = saved(tmp_path, "cnn")
    (cnn,) = folder.glob("1_*")
    if fault == "link":
        cnn.rename(tmp_path / "elsewhere")
        cnn.symlink_to(tmp_path / "elsewhere")
    elif fault == "adapter":
        tiny_models.write_json(cnn / "adapter_config.json", {})
    else:
        tiny_models.write_json(cnn / "tokenizer_config.json", {"auto_map": {"a": "b/c--d.E"}})
    match = {"link": "links to a folder", "adapter": "adapters", "code": "which nothing pins"}
    with pytest.raises(EncoderError, match=match[fault]):
        load(folder)
