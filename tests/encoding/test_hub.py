"""Models come from the hub: over HTTP, in a process of its own, down to the finished download."""

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.encoding.hub_server import Hub, at_hub
from tests.helpers import tiny_models
from whiten_index import EmbeddingStore, load_encoder
from whiten_index.versions.retention import describe_index

# Finds models one after another, each with a token or none, and prints what came of it.
FIND = """
import json, os, sys
from whiten_index.encoding.models import find_model
from whiten_index.errors import WhitenIndexError
found = []
for name, revision, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        model = find_model(name, revision=revision)
        files = [f.relative_to(model.root).as_posix() for f in model.root.rglob("*") if f.is_file()]
        about = {"commit": model.revision, "weights": model.weights_sha256, "files": sorted(files)}
    except WhitenIndexError as error:
        about = {"error": str(error), "exit_code": error.exit_code}
    found.append(about)
assert "torch" not in sys.modules
print(json.dumps(found))
"""
PLAIN = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
# What else lies in a repository of the hub; none of it is needed.
JUNK = (
    "README.md", ".gitattributes", "tf_model.h5", "flax_model.msgpack", "rust_model.ot",
    "model.onnx", "onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin",
    "pytorch_model.bin",
)  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint as transformers saves one. Do not write to it."""
    return tiny_models.bert(tmp_path_factory.mktemp("hub") / "bert")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"text": tiny_models.texts()}), tmp_path / "corpus.parquet")
    return tmp_path / "corpus.parquet"


def succeed(*arguments: Any, **more: str) -> Any:
    done = at_hub(*arguments, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fail(*arguments: Any, status: int = 4, **more: str) -> str:
    """Return the one sentence with which a command says that it cannot have its model."""
    done = at_hub(*arguments, **more)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return str(done.stderr.splitlines()[-1])


def encoding(corpus: Path, store: Path, model: str, *more: Any) -> tuple[Any, ...]:
    kept = ("--store", store, "--store-dtype", "float32", "--json")
    return ("encode", corpus, "--text-column", "text", "--model", model, *kept, *more)


def stored(store: Path) -> np.ndarray:
    opened = EmbeddingStore.open(store)
    return np.concatenate([opened.embeddings(part)[:] for part in opened.corpus().parts])


def recorded(store: Path) -> dict[str, Any]:
    return dict(EmbeddingStore.open(store).encoder)


def answered(hub: Hub, start: str) -> list[tuple[str, int]]:
    return [(r.path, r.status) for r in hub.log if r.path.startswith(start)]


def with_junk(source: Path, folder: Path) -> Path:
    tiny_models.copied(source, folder)
    for name in JUNK:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"junk" * 100)
    return folder


def pickled(folder: Path) -> None:
    """Turn a folder's weights into the older format."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.slow
def test_bert_base_uncased_comes_from_the_hub_and_then_from_the_cache(hub, corpus, tmp_path):
    """Under its old name, at the third try, and with a connection that ends in the midst of it."""
    folder = with_junk(tiny_models.bert(tmp_path / "plain"), tmp_path / "local")
    # Beyond the 10 MiB that the client reads at a time, so that it has a part to go on from.
    config = transformers.AutoConfig.from_pretrained(folder, vocab_size=100_000)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
    name, old = "google-bert/bert-base-uncased", "bert-base-uncased"
    commit = hub.add(name, folder)
    hub.moved[old] = name
    hub.faults["model.safetensors"] = ["reset", "503", "cut"]
    home, first, again = tmp_path / "home", tmp_path / "first", tmp_path / "again"
    command = encoding(corpus, first, old)

    told = fail(hub, home, *command)
    assert f"'{old}' is no folder here, nor whole in the cache {home / 'hub'}" in told
    assert f"cannot be fetched from {hub.url}" in told
    assert "reset by peer" in told
    assert "run this again, which keeps the files that came whole" in told
    assert "503" in fail(hub, home, *command)
    # Half a model in the cache is not taken for one.
    assert "OfflineModeIsEnabled" in fail(hub, home, *command, HF_HUB_OFFLINE="1")
    assert not first.exists()

    tried = len(hub.log)
    succeed(hub, home, *command)
    assert sorted(set(hub.downloads(name))) == PLAIN
    assert hub.downloads(name).count("config.json") == 1
    del hub.log[:tried]
    # The branch is asked for once: what it meant then is what is loaded later.
    assert answered(hub, f"/api/models/{name}/revision") == [
        (f"/api/models/{name}/revision/main", 200)
    ]
    assert (f"/api/models/{old}/revision/main", 307) in answered(hub, "/api/models/")
    parts = [(r.status, r.span) for r in hub.log if r.host == "storage"]
    assert parts == [(200, ""), (206, f"bytes={10 << 20}-")]
    assert not [r for r in hub.log if r.method not in ("GET", "HEAD") or r.token]
    encoder = recorded(first)
    assert (encoder["model"], encoder["revision"]) == (old, commit)
    local = load_encoder(str(folder))
    assert encoder["weights_sha256"] == local.spec.weights_sha256
    assert encoder["files_sha256"] == local.spec.files_sha256
    np.testing.assert_allclose(stored(first), local.encode(tiny_models.texts()), atol=1e-6)

    hub.stop()
    succeed(hub, home, *encoding(corpus, again, old), HF_HUB_OFFLINE="1")
    np.testing.assert_array_equal(stored(again), stored(first))
    assert recorded(again) == encoder


def test_a_sentence_transformers_model_of_a_branch_is_built_and_searched(
    hub, bert, corpus, tmp_path
):
    """As LaBSE: pickled weights alone for the transformer, both formats for its dense layer."""
    folder = tiny_models.copied(bert, tmp_path / "local")
    tiny_models.add_modules(folder, "cls", tiny_models.dense(), tiny_models.NORMALIZE)
    hub.add("org/tiny-st", folder)
    pickled(folder)
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"not needed")
    (folder / "3_Normalize").mkdir(exist_ok=True)
    commit = hub.add("org/tiny-st", folder, branch="pr/1")
    home, out = tmp_path / "home", tmp_path / "index"
    options = ("--model", "org/tiny-st", "--revision", "pr/1", "--whiten", "none")
    build = ("build", corpus, "--text-column", "text", *options, "--out", out, "--json")

    succeed(hub, home, *build)
    fetched = hub.downloads("org/tiny-st")
    assert {"pytorch_model.bin", "2_Dense/model.safetensors", "1_Pooling/config.json"} < {*fetched}
    assert not {"model.safetensors", "2_Dense/pytorch_model.bin"} & {*fetched}
    assert len(fetched) == len(set(fetched))

    hub.stop()
    encoder = describe_index(str(out))["encoder"]
    assert (encoder["model"], encoder["revision"]) == ("org/tiny-st", commit)
    # Not told to stay offline either: what is whole in the cache is not asked for.
    query = tiny_models.texts()[3]
    found = succeed(hub, home, "search", out, query, "--top-k", 24, "--json")
    local = load_encoder(str(folder))
    rows = local.encode([query, *tiny_models.texts()]).astype(np.float64)
    assert rows.shape == (25, 16)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    hits = sorted(found["results"][0]["hits"], key=lambda hit: hit["row"])
    np.testing.assert_allclose([hit["score"] for hit in hits], rows[1:] @ rows[0], atol=2e-3)


def test_files_are_fetched_as_they_are_needed_and_no_others(hub, bert, tmp_path):
    hub.add("org/both", with_junk(bert, tmp_path / "both"))
    main = hub.add("org/branches", bert)
    other = tiny_models.copied(bert, tmp_path / "other")
    tiny_models.write_json(other / "config.json", {**_config(bert), "hidden_act": "relu"})
    side = hub.add("org/branches", other, branch="side")
    pickled(other)
    hub.add("org/pickled", with_junk(other, tmp_path / "pickled"))
    torch.save(torch.load(other / "pytorch_model.bin"), tmp_path / "pickled" / "pytorch_model.bin")
    hub.add("org/pickled", tmp_path / "pickled")
    early = tmp_path / "early"
    tiny_models.copied(other, early / "0_Transformer")
    module = {"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}
    tiny_models.write_json(early / "modules.json", [module])
    hub.add("org/early", early)
    hub.add("org/gated", bert, reader="hf_reader")

    asked = [
        ("org/both", None, None), ("org/pickled", None, None), ("org/early", None, None),
        ("org/branches", None, None), ("org/branches", "side", None), ("org/branches", side, None),
        ("org/branches", side[:8], None), ("org/gated", None, "hf_reader"),
    ]  # fmt: skip
    found = succeed(hub, tmp_path / "home", json.dumps(asked), code=FIND)
    both, old, first, *revisions, gated = found
    assert sorted(both["files"]) == hub.downloads("org/both") == PLAIN
    text = [name for name in PLAIN if name != "model.safetensors"]
    assert (
        sorted(old["files"]) == hub.downloads("org/pickled") == sorted([*text, "pytorch_model.bin"])
    )
    assert "0_Transformer/pytorch_model.bin" in hub.downloads("org/early")
    assert old["weights"] == _sha256(tmp_path / "pickled" / "pytorch_model.bin")
    assert first["weights"] == _sha256(early / "0_Transformer" / "pytorch_model.bin")
    assert [found["commit"] for found in revisions] == [main, side, side, side]
    # One content is fetched once, whatever commits have it.
    assert sorted(hub.downloads("org/branches")) == sorted([*PLAIN, "config.json"])
    assert gated["weights"] == _sha256(bert / "model.safetensors")
    assert {r.token for r in hub.log if r.host == "storage"} == {""}
    assert {r.token for r in hub.log if "gated" in r.path} == {"Bearer hf_reader", ""}


def test_what_cannot_be_had_is_one_sentence_that_says_what_to_do(hub, bert, tmp_path):
    hub.add("org/gated", bert, reader="hf_reader")
    hub.add("org/open", bert)
    broken = tiny_models.copied(bert, tmp_path / "broken")
    (broken / "modules.json").write_text("{")
    hub.add("org/broken", broken)
    log_in = "log in with 'hf auth login' or set HF_TOKEN"
    gated = f"if it is private or gated, ask for access at {hub.url}/org/gated, then {log_in}"
    expected = [
        (("nobody/nothing", None, None), ("nobody/nothing' is no folder", "401", log_in)),
        (("nobody/nothing", None, "hf_x"), ("nobody/nothing' is no folder", "404", "spelling")),
        (("bert-bas-uncased", None, None), ("'bert-bas-uncased'", hub.url, "spelling")),
        (("org/gated", None, None), (gated,)),
        (("org/gated", None, "hf_x"), (gated,)),
        (("org/open", "no-branch", None), ("'org/open' at revision 'no-branch'", "--revision")),
        (("org/broken", None, None), ("org--broken", "modules.json cannot be read", "restore")),
    ]
    asked = json.dumps([question for question, _ in expected])
    for found, (question, parts) in zip(
        succeed(hub, tmp_path / "home", asked, code=FIND), expected, strict=True
    ):
        assert found["exit_code"] == 4, question
        assert "\n" not in found["error"]
        for part in parts:
            assert part in found["error"], question


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_cache_of_the_transformer_alone_is_not_the_whole_model(hub, tmp_path):
    """transformers leaves such a one: nothing there says that the model has a pooling."""
    model = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"), "cls")
    hub.add("acme/cls", model)
    code = (
        "from whiten_index.encoding.models import find_model; print(find_model('acme/cls').pooling)"
    )
    find = functools.partial(at_hub, hub, tmp_path / "home", code=code)
    assert find().stdout == "cls\n"
    (kept,) = (tmp_path / "home").rglob("snapshots/*")
    for path in (kept / "modules.json", kept / "sentence_bert_config.json"):
        path.unlink()
    for folder in (kept / "1_Pooling", *(tmp_path / "home").rglob("trees")):
        shutil.rmtree(folder)
    offline = find(HF_HUB_OFFLINE="1")
    assert (offline.returncode, "nor whole in the cache" in offline.stderr) == (1, True)
    assert find().stdout == "cls\n"
