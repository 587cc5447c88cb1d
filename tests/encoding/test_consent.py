"""Whoever opens an index decides whether its model's code runs and whether a hub is asked."""

import json
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.encoding.hub_server import at_hub
from tests.helpers import tiny_models
from tests.helpers.bad_input import fails, run, succeed
from tests.helpers.builds import build_texts
from tests.helpers.code_models import TEXTS, code_model, edit_json, forged, seal, write_texts
from whiten_index import QueryTransform, load_encoder, open_index
from whiten_index.encoding.models import find_model
from whiten_index.errors import EncoderError, WhitenIndexError
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig

ENCODER_EXIT = 4
FLAG = "--trust-remote-code"


class Place:
    """An index of a model with code, made with consent, and what is needed to use it."""

    def __init__(self, root: Path) -> None:
        self.root, self.mark = root, root / "mark"
        self.model = code_model(root / "model", self.mark)
        self.corpus, self.index = write_texts(root), root / "index"
        options = {"id_column": "id", "keep": ("text",), "trust_remote_code": True}
        build_texts(self.index, self.corpus, self.model, **options)
        QueryTransform.of(self.index).save(root / "saved")
        self.saved = root / "saved"
        scores = [0.2 * i for i in range(20)]
        tables = {
            "pairs": {"sentence1": TEXTS[:20], "sentence2": TEXTS[20:40], "score": scores},
            "queries": {"id": ["q0", "q1"], "text": TEXTS[:2]},
            "canaries": {"text": TEXTS[:1], "expected": [["d0"]]},
        }
        for name, columns in tables.items():
            pq.write_table(pa.table(columns), root / f"{name}.parquet")
        (root / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq1\td1\t1\n")
        fewer = {"id": [f"d{i}" for i in range(38)], "text": TEXTS[:38]}
        pq.write_table(pa.table(fewer), root / "fewer.parquet")
        # More texts than before, so that an update encodes.
        more = {"id": [*(f"d{i}" for i in range(40)), "new"], "text": [*TEXTS, "a cold king sang"]}
        pq.write_table(pa.table(more), root / "more.parquet")
        self.mark.unlink()

    def copy(self, folder: Path) -> Path:
        """Return a copy of the index that may be changed."""
        return Path(shutil.copytree(self.index, folder))

    def ran(self) -> bool:
        """Tell whether the model's code ran since the last call."""
        found = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return found


@pytest.fixture(scope="module")
def place(own_modules: None, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("consent"))


COMMANDS = {
    "search": "search {index} 'the cat'",
    "search of a file": "search {index} --queries {root}/queries.parquet --text-column text "
    "--id-column id --run {out}/run.trec",
    "update": "update {index} {root}/more.parquet",
    "update with canaries": "update {index} {root}/fewer.parquet "
    "--canary-file {root}/canaries.parquet",
    "plan of an update": "update {index} {root}/more.parquet --dry-run",
    "export": "export {index} {out}/st --as sentence-transformers",
    "eval sts": "eval sts {root}/pairs.parquet --index {index}",
    "eval geometry": "eval geometry {root}/pairs.parquet --index {index}",
    "eval retrieval": "eval retrieval --index {index} --queries {root}/queries.parquet "
    "--qrels {root}/qrels.tsv",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_the_models_code_only_with_the_flag(name, place, tmp_path):
    index = place.copy(tmp_path / "index")
    command = shlex.split(COMMANDS[name].format(index=index, root=place.root, out=tmp_path))
    code, _, err = run(*command)
    assert code == ENCODER_EXIT, err
    assert FLAG in err
    assert str(place.model) in err.replace("\n", "")
    assert not place.ran()
    succeed(*command, FLAG)
    # An export copies the model's files and runs nothing.
    assert place.ran() == (name != "export")


def test_commands_that_need_no_model_need_no_consent(place, tmp_path):
    for command in (
        f"push {place.index} --to {tmp_path}/rows.parquet",
        f"export {place.index} {tmp_path}/half --as query",
        f"export {place.index} {tmp_path}/matrix.safetensors",
        f"search {place.index} --like d3",
        f"verify {place.index}",
        f"inspect {place.index}",
    ):
        succeed(*shlex.split(command))
    assert not place.ran()


OPENERS: dict[str, Callable[[Place, dict[str, Any]], Any]] = {
    "open_index": lambda place, how: open_index(place.index, **how).search(["the cat"]),
    "QueryTransform.of": lambda place, how: QueryTransform.of(place.index, **how).encode_queries(
        ["the cat"]
    ),
    "QueryTransform.load": lambda place, how: QueryTransform.load(
        place.saved, **how
    ).encode_documents(["the cat"]),
    "QueryTransform.truncate": lambda place, how: (
        QueryTransform.of(place.index, **how).truncate(4).encode_queries(["the cat"])
    ),
    "a pickled QueryTransform": lambda place, how: pickle.loads(
        pickle.dumps(QueryTransform.of(place.index, **how))
    ).encode_queries(["cat"]),
}


@pytest.mark.parametrize("name", OPENERS)
def test_python_runs_the_models_code_only_with_consent(name, place):
    for how in ({}, {"model": str(place.model)}, {"trust_remote_code": "False"}):
        with pytest.raises(EncoderError, match="trust_remote_code=True") as caught:
            OPENERS[name](place, how)
        assert str(place.model) in str(caught.value)
    assert not place.ran()
    assert len(OPENERS[name](place, {"trust_remote_code": True}))
    assert place.ran()


def test_a_nightly_job_consents_in_its_file(place, tmp_path):
    index, job = place.copy(tmp_path / "index"), tmp_path / "job.toml"
    told = f'index = "{index}"\ncorpus = ["{place.root}/more.parquet"]\n'
    job.write_text(told)
    code, out, err = run("nightly", job)
    assert code == ENCODER_EXIT, err
    assert "trust-remote-code = true" in out + err
    assert not place.ran()
    job.write_text(f"{told}trust-remote-code = true\n")
    succeed("nightly", job)
    assert place.ran()


def test_consent_is_written_nowhere(place, tmp_path):
    index = place.copy(tmp_path / "index")
    options = {"corpus": (f"{place.root}/more.parquet",), "device": "cpu"}
    update_index(UpdateConfig(index=str(index), trust_remote_code=True, **options))
    assert len(list((index / "versions").iterdir())) == 2
    QueryTransform.of(index, trust_remote_code=True).save(tmp_path / "half")
    for path in (*tmp_path.rglob("*.json"), *place.root.rglob("*.json"), index / "CURRENT"):
        assert "trust_remote_code" not in path.read_text(), path
    place.ran()
    with pytest.raises(EncoderError, match=FLAG):
        open_index(index).search(["the cat"])
    assert not place.ran()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """An index of a model without code."""
    model = tiny_models.bert(tmp_path / "plain-model")
    return build_texts(tmp_path / "plain", write_texts(tmp_path), model, id_column="id").out


@pytest.mark.parametrize("claims", [{"needs_code": False}, {"needs_code": True}, {}])
def test_a_forged_manifest_cannot_consent(claims, place, tmp_path):
    """It denies that the model needs code, or claims that running it is allowed."""
    bad = forged(place.index, tmp_path / "bad", **claims)
    half = Path(shutil.copytree(place.saved, tmp_path / "half"))
    fields = json.loads((half / "manifest.json").read_text())
    fields["encoder"] |= claims
    seal(half / "manifest.json", fields)
    (tmp_path / "out").mkdir()
    for name, command in COMMANDS.items():
        filled = command.format(index=bad, root=place.root, out=tmp_path / "out")
        if name != "export" or claims.get("needs_code") is not False:
            fails(ENCODER_EXIT, FLAG, *shlex.split(filled))
    with pytest.raises(EncoderError, match=FLAG):
        open_index(bad).search(["cat"])
    with pytest.raises(WhitenIndexError, match=f"{FLAG}|its transform is another one"):
        QueryTransform.load(half).encode_queries(["cat"])
    assert not place.ran()


def test_modules_of_other_packages_never_run(plain, tmp_path, monkeypatch):
    """Neither what a step of ``modules.json`` is, nor that it is there, depends on consent."""
    mark = tmp_path / "mark"
    (tmp_path / "odd_steps.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\nStep = dict\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = tmp_path / "plain-model"
    for steps in (["odd_steps.Step"], ["sentence_transformers.models.Pooling", "odd_steps.Step"]):
        types = ["sentence_transformers.models.Transformer", *steps]
        tiny_models.write_json(
            model / "modules.json",
            [{"idx": i, "name": str(i), "path": "", "type": t} for i, t in enumerate(types)],
        )
        for flag in ((), (FLAG,)):
            fails(ENCODER_EXIT, "odd_steps.Step", "search", plain, "the cat", *flag)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_implementation": "acme/fast"}, "code (attn_implementation 'acme/fast') that"),
        ({"_attn_implementation": "acme/fast"}, "code (attn_implementation 'acme/fast') that"),
        (
            {"text_config": {"attn_implementation": "acme/fast"}},
            "code (attn_implementation 'acme/fast') that",
        ),
        ({"attn_implementation": "flash_attention_2"}, "'flash_attention_2') that may come"),
        ({"configuration_files": ["config.4.0.0.json"]}, "sets configuration_files, by which"),
        ({"attribute_map": {"a": "_attn_implementation_internal"}}, "sets attribute_map, by which"),
        ({"experts_implementation": "sonicmoe"}, "code (experts_implementation 'sonicmoe') that"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "has quantized weights, for which code may come from the hub",
        ),
        ({"model_type": "yoso"}, "is of the family yoso, for which code may come"),
        (
            {"model_type": "timm_wrapper", "architecture": "hf-hub:acme/x"},
            "('hf-hub:acme/x'), which",
        ),
        ({"model_type": "detr", "backbone": "acme/images"}, "('acme/images'), which"),
        ({"text_config": {"backbone": "acme/images"}}, "('acme/images'), which"),
        ({"num_hidden_layers": 1001}, "says 1,001 layers"),
        ({"num_hidden_layers": 0}, "has none of num_hidden_layers"),
        ({"num_mtp_layers": 10**9}, "says 1,000,000,000 layers"),
        (
            {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 10**9]]},
            "says 2,000,000,000 layers",
        ),
        ({"text_config": {"attention_types": [[[], 10**9], ["ab", -5]]}}, "says 1,000,000,000"),
        ({"model_type": "fnet", "use_tpu_fourier_optimizations": True}, "texts of one length"),
        ({"num_labels": 10**10}, "says 10,000,000,000 labels"),
        ({"max_position_embeddings": 10**9}, "says 1,000,000,000 positions"),
        ({"model_type": "distilbert", "max_position_embeddings": 10**5}, "says 100,000 positions"),
        (
            {"model_type": "distilbert", "dim": 65_536, "max_position_embeddings": 8192},
            "says 8,192 positions; a model has at most 128",
        ),
        ({"model_type": "xlm", "emb_dim": 65_536, "max_position_embeddings": 512}, "at most 128"),
        ({"model_type": "informer", "prediction_length": 10**5}, "says 100,000 positions"),
        ({"model_type": "ctrl", "n_positions": 10**4}, "says 10,000 positions"),
        ({"model_type": "mpt", "max_seq_len": 10**8}, "says 100,000,000 tokens"),
        (
            {"model_type": "longformer", "attention_window": [2, 10**6]},
            "says 1,000,000 tokens of a window",
        ),
        ({"model_type": "pegasus_x", "block_size": 4096}, "says 4,096 tokens of a window"),
        ({"model_type": "longt5", "local_radius": 8000}, "says 8,000 tokens of a radius"),
        ({"model_type": "funnel", "block_repeats": [10**9]}, "says 1,000,000,000 layers"),
        ({"encoder": {"model_type": "marian"}, "n_positions": 10**5}, "says 100,000 positions"),
        (
            {"encoder": {"model_type": ["marian"]}, "n_positions": 10**7},
            "says 10,000,000 positions",
        ),
    ],
)
def test_a_configuration_is_looked_at_before_a_model_is_made(change, message, plain, tmp_path):
    """transformers fetches and makes what ``config.json`` alone names."""
    edit_json(tmp_path / "plain-model" / "config.json", **change)
    code, _, err = run("search", plain, "the cat")
    assert code == ENCODER_EXIT
    assert message in " ".join(err.split())


@pytest.mark.parametrize("flag", [(), (FLAG,)])
def test_a_pickle_among_the_weights_never_runs(flag, plain, tmp_path):
    """Its digest is forged too, so that only the reader of weights stands in the way."""

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "mark",))

    model = tmp_path / "plain-model"
    weights = {**load_file(model / "model.safetensors"), "x": Attack()}
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")
    bad = forged(plain, tmp_path / "bad", weights_sha256=find_model(str(model)).weights_sha256)
    fails(ENCODER_EXIT, "cannot be loaded", "search", bad, "the cat", *flag)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("model", "revision"),
    [("evil", None), ("./evil", None), ("org/evil", None), ("org/evil", "main"), ("~/evil", None),
     ("org/evil", "../../../evil"), ("evil", "embedded"), ("", None)],
)  # fmt: skip
def test_a_name_in_a_manifest_is_never_a_folder_here(model, revision, plain, tmp_path, monkeypatch):
    """The opener stands in a folder where the attacker has put a model of that name."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("evil", "org/evil"):
        shutil.copytree(tmp_path / "plain-model", home / name)
    monkeypatch.chdir(home)
    bad = forged(plain, tmp_path / "bad", model=model, revision=revision)
    commands = (("search", bad, "the cat"), ("update", bad, "--read-all"))
    for command in commands:
        fails(ENCODER_EXIT, "--model", *command)
    # Who names the model says where it is.
    succeed("search", bad, "the cat", "--model", tmp_path / "plain-model")


@pytest.mark.slow
def test_a_hub_is_asked_only_for_a_model_that_the_opener_names(hub, tmp_path):
    model, mark = code_model(tmp_path / "model", tmp_path / "mark"), tmp_path / "mark"
    commit = hub.add("acme/odd", model)
    corpus, index = write_texts(tmp_path), tmp_path / "index"
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"

    def do(home: Path, *command: Any) -> tuple[int, str, list[Any]]:
        before = len(hub.log)
        done = at_hub(hub, home, *command, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr, hub.log[before:]

    build = (
        "build", corpus, "--out", index, "--text-column", "text", "--model", "acme/odd", "--whiten",
        "whitening", "--k", "8", FLAG,
    )  # fmt: skip
    code, said, asked = do(mine, *build)
    assert code == 0, said
    assert asked
    # The branch moves on; the index stays one of its commit.
    edit_json(model / "config.json", layer_norm_eps=0.5)
    hub.add("acme/odd", model)
    # A folder of the model's name where the opener stands is not the model.
    shutil.copytree(model, tmp_path / "acme/odd")
    mark.unlink()
    search = ("search", index, "the cat")
    for command in (search, ("update", index, "--read-all"), (*search, FLAG)):
        code, said, asked = do(theirs, *command)
        assert (code, asked) == (ENCODER_EXIT, []), said
        assert "acme/odd" in said
        assert commit in said
    assert "--model" in said
    assert not (theirs / "hub").exists()
    assert not mark.exists()
    code, said, asked = do(mine, *search, FLAG)
    assert (code, asked) == (0, []), said
    mark.unlink()
    code, said, _ = do(theirs, *search, "--model", "acme/odd")
    assert (code, FLAG in said, mark.exists()) == (ENCODER_EXIT, True, False)
    code, said, asked = do(theirs, *search, "--model", "acme/odd", FLAG)
    assert code == 0, said
    assert asked
    assert mark.exists()


def test_a_build_can_be_kept_from_the_hub(hub, tmp_path):
    hub.add("acme/plain", tiny_models.bert(tmp_path / "model"))
    encode = (
        "encode", write_texts(tmp_path), "--store", tmp_path / "store", "--text-column", "text",
        "--model", "acme/plain",
    )  # fmt: skip
    done = at_hub(hub, tmp_path / "home", *encode, "--local-files-only", cwd=tmp_path)
    assert (done.returncode, hub.log) == (ENCODER_EXIT, []), done.stderr
    assert "is not on this machine" in done.stderr
    fetch = "from whiten_index.encoding.models import find_model; find_model('acme/plain')"
    done = at_hub(hub, tmp_path / "home", code=fetch)
    assert done.returncode == 0, done.stderr
    seen = len(hub.log)
    done = at_hub(hub, tmp_path / "home", *encode, "--local-files-only", cwd=tmp_path)
    assert (done.returncode, len(hub.log)) == (0, seen), done.stderr


@pytest.mark.parametrize("where", ["a path", "a link", "a folder that nothing reads"])
def test_code_that_has_changed_never_runs_wherever_it_is(where, own_modules, tmp_path):
    model, mark = code_model(tmp_path / "model", tmp_path / "mark"), tmp_path / "mark"
    elsewhere = model / "onnx" if where.startswith("a folder") else tmp_path / "elsewhere"
    elsewhere.mkdir()
    (model / "odd.py").rename(elsewhere / "odd.py")
    if where == "a link":
        (model / "onnx").symlink_to(elsewhere)
    named = str(elsewhere) if where == "a path" else "onnx"
    classes = {f"Auto{each}": f"{named}/odd.Odd{each}" for each in ("Config", "Model")}
    edit_json(model / "config.json", auto_map=classes)
    options: dict[str, Any] = {"model": str(model), "trust_remote_code": True, "device": "cpu"}
    if where in ("a path", "a link"):
        with pytest.raises(EncoderError, match=r"outside of it|links to a folder"):
            load_encoder(**options)
    else:
        before = load_encoder(**options).spec.fingerprint
        mark.unlink()
        code = elsewhere / "odd.py"
        code.write_text(code.read_text() + "\n# changed\n")
        assert tiny_models.resolve(**options).fingerprint != before
    assert not mark.exists()
