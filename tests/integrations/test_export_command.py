"""``whiten-index export``: what it says of each form, and what it refuses."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import tiny_models
from tests.helpers.bad_input import one_object, run, succeed
from tests.helpers.builds import build_texts
from whiten_index import Moments, QueryTransform, Whitening, WhiteningConfig, load_encoder
from whiten_index.errors import EncoderError
from whiten_index.integrations.sentence_transformers import export_model

K = 6
FORMS = {"matrix": "w.safetensors", "query": "q", "sentence-transformers": "m", "sql": "w.sql"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of texts by a tiny model in a folder. Do not write to it."""
    root = tmp_path_factory.mktemp("texts")
    model = tiny_models.add_modules(tiny_models.bert(root / "secret" / "tiny-bert"), "mean")
    texts = tiny_models.texts(80)
    pq.write_table(pa.table({"id": list(range(80)), "text": texts}), root / "c.parquet")
    return build_texts(root / "out", root / "c.parquet", model, id_column="id", k=K).out


@pytest.mark.parametrize("form", FORMS)
def test_every_form_tells_the_digest_of_the_transform(
    index: Path, tmp_path: Path, form: str
) -> None:
    arguments = ("export", index, tmp_path / FORMS[form], "--as", form)
    for k in (None, 4):
        width = () if k is None else ("--k", k)
        digest = QueryTransform.of(index, k=k).query_digest
        assert digest in succeed(*arguments, *width)
        assert one_object(succeed(*arguments, *width, "--json"))["query_digest"] == digest
    assert QueryTransform.of(index).query_digest != digest


@pytest.mark.parametrize("how", ["added to", "within a script", "changed"])
def test_a_script_of_a_user_is_not_replaced(index: Path, tmp_path: Path, how: str) -> None:
    path = tmp_path / "w.sql"
    succeed("export", index, path)
    succeed("export", index, path)
    made = path.read_text()
    added = {
        "added to": made + "SELECT 1;\n",
        "within a script": "CREATE TABLE t (i int);\n" + made,
    }
    path.write_text(added.get(how, made.replace("COMMIT", "-- mine\nCOMMIT")))
    before = path.read_bytes()
    status, _, stderr = run("export", index, path)
    assert (status, path.read_bytes()) == (2, before), stderr
    assert "something else than an exported function" in stderr


@pytest.fixture
def dense(tmp_path: Path) -> tuple[Path, QueryTransform]:
    """A model with a layer after its pooling, and a transform of its embeddings."""
    model = tiny_models.add_modules(tiny_models.bert(tmp_path / "m"), "mean", tiny_models.dense())
    encoder = load_encoder(str(model))
    moments = Moments.of(encoder.encode(tiny_models.texts(80)).astype(np.float64))
    whitening = Whitening.fit(moments, WhiteningConfig(k=K))
    return model, QueryTransform(whitening, encoder.spec.to_json())


def test_links_in_a_model_of_others_are_not_followed(
    dense: tuple[Path, QueryTransform], tmp_path: Path
) -> None:
    model, transform = dense
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("of mine")
    layer = next(model.glob("2_*"))
    (layer / "notes").symlink_to(tmp_path / "private")
    for name in "ab":
        (layer / name).symlink_to(".")
    export_model(transform, tmp_path / "out")
    made = {path.name for path in (tmp_path / "out" / "2_Dense").iterdir()}
    assert made == {"config.json", "model.safetensors"}
    (model / "LICENSE").symlink_to(tmp_path / "private" / "key")
    with pytest.raises(EncoderError, match=r"LICENSE of model .* is a link to a file outside"):
        export_model(transform, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_model_that_is_replaced_while_it_is_copied_is_not_exported(
    dense: tuple[Path, QueryTransform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, transform = dense
    real = shutil.copyfile

    def replaced(source: Path, target: Path) -> None:
        (model / "model.safetensors").touch()
        real(source, target)

    monkeypatch.setattr("shutil.copyfile", replaced)
    with pytest.raises(EncoderError, match=r"model\.safetensors .* changed while it was used"):
        export_model(transform, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "name"),
    [("query", "m.safetensors"), ("query", "m.SQL"), ("sql", "m.safetensors"), ("matrix", "m.sql")],
)
def test_the_name_of_another_form_is_refused(
    index: Path, tmp_path: Path, form: str, name: str
) -> None:
    status, stdout, stderr = run("export", index, f"{tmp_path}/{name}", "--as", form)
    assert (status, stdout) == (2, "")
    assert f"and --as {form} is something else; give another name" in stderr
    assert not list(tmp_path.iterdir())
