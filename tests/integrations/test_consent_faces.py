"""The frameworks' classes run a model's code only where they are given consent."""

import copy
import functools
import importlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.encoding import test_consent
from tests.helpers.builds import build, random_rows, write_rows
from tests.helpers.code_models import forged
from whiten_index import QueryTransform, open_index
from whiten_index.errors import ArtifactError, ConfigError, EncoderError

pytestmark = pytest.mark.service

place = test_consent.place
QUERY = "the cat sat"


def embedded_document(make: Any, index: Path, how: dict[str, Any]) -> Any:
    from haystack import Document

    embedder = make(index, progress_bar=False, **how)
    embedder.warm_up()
    return embedder.run([Document(content=QUERY)])["documents"]


def exported(export: Any, index: Path, how: dict[str, Any]) -> Any:
    transform = QueryTransform.of(index, **how)
    facts = export(transform, index.parent / "exported")
    # An export runs nothing; its reader asks for consent again.
    transform.encode_queries([QUERY])
    return facts


# Name -> its answer, given the class of the name.
FACES: dict[str, Callable[[Any, Path, dict[str, Any]], Any]] = {
    "langchain.WhitenedEmbeddings": lambda it, at, how: it(at, **how).embed_query(QUERY),
    "langchain.WhitenedRetriever": lambda it, at, how: it(index=at, **how).invoke(QUERY),
    "llama_index.WhitenedEmbedding": lambda it, at, how: it(at, **how).get_query_embedding(QUERY),
    "llama_index.WhitenedIndexRetriever": lambda it, at, how: it(at, **how).retrieve(QUERY),
    "haystack.WhitenedTextEmbedder": lambda it, at, how: it(at, **how).run(QUERY)["embedding"],
    "haystack.WhitenedDocumentEmbedder": embedded_document,
    "haystack.WhitenedIndexRetriever": lambda it, at, how: it(at, **how).run(QUERY)["documents"],
    "mteb.WhitenedEncoder": lambda it, at, how: it.of_index(at, **how).encoder.encode([QUERY]),
    "sentence_transformers.export_model": exported,
}  # fmt: skip


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> Callable[[Path | str, dict[str, Any]], Any]:
    """Ask through a class of a framework."""
    return functools.partial(FACES[request.param], class_of(request.param))


def test_a_face_runs_the_models_code_only_with_consent(face, place, tmp_path):
    bad = forged(place.index, tmp_path / "bad")
    for index in (place.index, bad):
        with pytest.raises(EncoderError, match="trust_remote_code=True") as caught:
            face(index, {})
        assert str(place.model) in str(caught.value)
        assert not place.ran()
    assert len(face(place.index, {"trust_remote_code": True}))
    assert place.ran()


def test_what_is_no_index_is_refused(face, place, tmp_path):
    build(tmp_path / "columns", write_rows(tmp_path / "e.parquet", random_rows()))
    for index, error, said in (
        (tmp_path / "none", ArtifactError, "does not exist; check the path, or build an index"),
        (tmp_path, ArtifactError, "CURRENT"),
        ("", ConfigError, "an empty path was given"),
        (tmp_path / "columns", ConfigError, "embedding column.* --model "),
    ):
        with pytest.raises(error, match=said):
            face(index, {})


def test_what_frameworks_write_down_carries_no_consent(place):
    from langchain_core.load import dumps

    from whiten_index.integrations import haystack, langchain, llama_index

    how = {"trust_remote_code": True}
    written = [
        dumps(langchain.WhitenedRetriever(index=str(place.index), **how)),
        llama_index.WhitenedEmbedding(place.index, **how).to_json(),
        *(
            json.dumps(kind(place.index, **how).to_dict())
            for kind in (
                haystack.WhitenedTextEmbedder,
                haystack.WhitenedDocumentEmbedder,
                haystack.WhitenedIndexRetriever,
            )
        ),
    ]
    assert all(str(place.index) in each for each in written)
    assert not any("trust_remote_code" in each for each in written)
    for kind in (haystack.WhitenedIndexRetriever, llama_index.WhitenedIndexRetriever):
        with pytest.raises(ConfigError, match="give it as an argument"):
            kind(place.index, options=how)
    place.ran()


def test_what_was_written_down_gives_no_consent(place):
    from haystack import Pipeline

    from whiten_index.integrations import haystack, llama_index

    pipeline = Pipeline()
    pipeline.add_component("one", haystack.WhitenedTextEmbedder(place.index))
    pipeline.add_component("two", haystack.WhitenedIndexRetriever(place.index))
    pipeline.add_component("three", haystack.WhitenedDocumentEmbedder(place.index))
    for name in ("one", "two", "three"):
        forged_file = pipeline.to_dict()
        forged_file["components"][name]["init_parameters"]["trust_remote_code"] = True
        with pytest.raises(Exception, match="a file gives no permission"):
            Pipeline.loads(json.dumps(forged_file), allowed_modules=["whiten_index.*"])
    kind = llama_index.WhitenedEmbedding
    settings = json.loads(kind(place.index).to_json())
    with pytest.raises(ConfigError, match="a file gives no permission"):
        kind.from_json(json.dumps({**settings, "trust_remote_code": True}))
    assert not place.ran()
    assert kind.from_json(json.dumps(settings), trust_remote_code=True).get_query_embedding(QUERY)
    assert place.ran()


def test_copies_within_a_program_keep_consent(place):
    from whiten_index.integrations import langchain, llama_index

    how = {"trust_remote_code": True}
    retriever = langchain.WhitenedRetriever(index=str(place.index), **how)
    embedding = llama_index.WhitenedEmbedding(place.index, **how)
    for copied in (copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))):
        assert copied(retriever).invoke(QUERY) == retriever.invoke(QUERY)
        assert copied(embedding).get_query_embedding(QUERY)
    place.ran()


CLASSES = pytest.mark.parametrize(
    "name",
    [
        "langchain.WhitenedEmbeddings", "langchain.WhitenedRetriever",
        "llama_index.WhitenedEmbedding", "llama_index.WhitenedIndexRetriever",
        "haystack.WhitenedTextEmbedder", "haystack.WhitenedDocumentEmbedder",
        "haystack.WhitenedIndexRetriever",
    ],
)  # fmt: skip


def class_of(name: str) -> Any:
    module, _, kind = name.partition(".")
    return getattr(importlib.import_module(f"whiten_index.integrations.{module}"), kind)


@CLASSES
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        # Other classes of the frameworks take it, and pipelines would be written down with it.
        ({"api_key": "sk-hunter2"}, (ConfigError, ValueError), "api_key"),
        ({"model": "https://me:hunter2@huggingface.co/acme/model"}, ConfigError, "has a password"),
    ],
)
def test_a_secret_is_refused_before_it_is_held(name, place, given, error, said):
    retriever = "Retriever" in name
    where = {"index" if retriever else "source": str(place.index)}
    with pytest.raises(error, match=said) as caught:
        class_of(name)(**where, **({"options": given} if retriever else given))
    assert "hunter2" not in f"{caught.value} {caught.value!r}"


def test_an_option_that_is_not_known_is_refused(place):
    for name in ("api_key", "trust_remote_cod"):
        with pytest.raises(ConfigError, match=f"the option {name} is unknown; "):
            open_index(place.index, **{name: "x"})
        with pytest.raises(ConfigError, match=f"the option {name} is unknown; "):
            QueryTransform.of(place.index, **{name: "x"})


@pytest.mark.parametrize("name", ["base_url", "api_key", "store"])
@pytest.mark.parametrize("kind", ["langchain.WhitenedRetriever", "llama_index.WhitenedEmbedding"])
def test_a_setting_that_is_not_known_is_not_quoted(kind, name, place):
    where = {"index" if "Retriever" in kind else "source": str(place.index)}
    with pytest.raises(ValueError, match=name) as caught:
        class_of(kind)(**where, **{name: "https://me:hunter2@host/v1"})
    assert "hunter2" not in f"{caught.value} {caught.value!r}"


def test_a_transform_holds_no_secret(place):
    with pytest.raises(ConfigError, match=r"model .* has a password"):
        QueryTransform.of(place.index, model="https://me:hunter2@huggingface.co/acme/model")
