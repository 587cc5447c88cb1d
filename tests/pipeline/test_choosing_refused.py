"""What ``--whiten auto`` refuses: samples, labels and options that cannot choose."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import choosing
from tests.pipeline.choosing import Place
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.pipeline.build import BuildReport

place = choosing.place


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--queries", "{queries}"), "--qrels is missing"),
        (("--qrels", "{qrels}"), "--queries is missing"),
        (("--qrels-split", "test"), "--qrels-split test needs --qrels"),
        (("--queries", "{queries}", "--qrels", "{qrels}", "--qrels-split", "dev"), "column split"),
        (("--whiten", "whitening", "--qrels", "{qrels}"), "--qrels.*nothing to choose"),
        (("--shrinkage", "oas"), "--shrinkage.*--whiten auto chooses"),
        (("--remove-top", "1"), "--remove-top.*--whiten auto chooses"),
        (("--group-size", "4"), "--group-size"),
        (("--k", "33"), "33.*32"),
        (("--exponent", "-1"), "--exponent takes a value greater"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_do_not_go_together_are_refused(
    place: Place, flags: tuple[str, ...], match: str
) -> None:
    labels = choosing.judged(place.root, place.texts)
    names = {"queries": labels.queries, "qrels": labels.qrels}
    arguments = place.arguments(*(flag.format(**names) for flag in flags))
    choosing.assert_refused(choosing.OPTIONS, match, *arguments)


BAD_LABELS = {
    "9 judged queries": "leaves 9 queries to choose by",
    "9 queries with a text": r"leaves 9 queries to choose by \(9 of 20 have a text\)",
    "no pytrec_eval": r"whiten-index\[eval\]",
    "a column without its model": "name the model of the embedding column with --model",
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_labels_that_cannot_choose_are_refused_before_anything_is_encoded(
    tmp_path: Path, chosen: tuple[Place, BuildReport], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, options = chosen[0], dict[str, Any]()
    labels = choosing.judged(tmp_path, place.texts, count=9 if "9 judged" in case else 20)
    options |= labels.options()
    if case == "a column without its model":
        options |= {**choosing.embedded(tmp_path / "e.parquet"), "model": None, "text_columns": ()}
    elif case == "9 queries with a text":
        few = list(labels.texts)[:9]
        options["queries"] = choosing.parquet(
            tmp_path / "few.parquet", id=few, text=[labels.texts[name] for name in few]
        )
    elif case == "no pytrec_eval":
        monkeypatch.setitem(sys.modules, "pytrec_eval", None)
    expected = ConfigError if case in list(BAD_LABELS)[-2:] else CorpusError
    with pytest.raises(expected, match=BAD_LABELS[case]):
        place.build(tmp_path / "out", store=str(tmp_path / "store"), **options)
    assert not choosing.shards(tmp_path)
