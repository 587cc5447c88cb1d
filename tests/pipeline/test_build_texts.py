"""Builds of a corpus of texts: what is encoded, what is taken from the store, what is searched."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import run_python
from tests.helpers.builds import build
from whiten_index import open_index
from whiten_index.errors import ConfigError


def text_corpus(folder: Path, words: Sequence[str], *, files: int = 2, rows: int = 40) -> str:
    random = np.random.default_rng(20)
    for file in range(files):
        texts = [" ".join(random.choice(words, 6)) + f" {file} {i}" for i in range(rows)]
        ids = [f"{file}-{i}" for i in range(rows)]
        folder.mkdir(exist_ok=True)
        table = pa.table({"id": ids, "text": texts, "year": range(rows)})
        pq.write_table(table, folder / f"{file}.parquet")
    return str(folder)


@pytest.fixture
def texts(tmp_path: Path, tiny_words: tuple[str, ...]) -> str:
    return text_corpus(tmp_path / "corpus", tiny_words)


def text_options(model: Path, **more: Any) -> dict[str, Any]:
    plain = {"embedding_column": None, "text_columns": "text", "model": str(model)}
    return {**plain, "shard_rows": 20, "threads": 1, **more}


def test_a_build_from_the_store_alone_needs_no_encoder_and_gives_the_same_index(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    store, out = tmp_path / "store", tmp_path / "alone"
    whole = build(
        tmp_path / "whole", texts, store=str(store), keep="year", **text_options(tiny_model)
    )
    script = (
        "import sys; from whiten_index import BuildConfig, build_index, open_index\n"
        f"report = build_index(BuildConfig(store={str(store)!r}, out={str(out)!r}, k=6, "
        "whiten='whitening'))\n"
        "assert report.encoded.counts.reused == report.encoded.counts.read == 80\n"
        "assert report.encoded.counts.encoded == 0\n"
        f"assert len(open_index({str(out)!r}).search_like('1-7')) == 10\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)), 'loaded')"
    )
    assert run_python("-c", script) == "loaded\n"
    assert whole.encoded.counts.encoded == 80
    queries = ["the cat sat on the mat", "stars and the moon"]
    indexes = open_index(tmp_path / "whole", device="cpu"), open_index(out, device="cpu")
    for one, other in zip(*(index.search(queries) for index in indexes), strict=True):
        assert [(hit.id, dict(hit.columns)) for hit in one] == [
            (hit.id, dict(hit.columns)) for hit in other
        ]
        np.testing.assert_allclose([h.score for h in one], [h.score for h in other], atol=1e-6)


def test_other_ids_or_kept_columns_encode_nothing_again(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    out = tmp_path / "out"
    build(out, texts, **text_options(tiny_model))
    for change in ({"keep": ("year",)}, {"id_column": None}, {"id_column": None, "keep": ("id",)}):
        if "id" in change.get("keep", ()):
            with pytest.raises(ConfigError, match="cannot be called 'id'"):
                build(out, texts, **text_options(tiny_model, **change))
            continue
        report = build(out, texts, **text_options(tiny_model, **change))
        assert (report.encoded.counts.encoded, report.encoded.counts.reused) == (0, 80)
    hit = open_index(out, device="cpu").search(["the cat"], top_k=1)[0][0]
    assert str(hit.id).endswith(f"#0:{str(hit.id).rpartition(':')[2]}")
