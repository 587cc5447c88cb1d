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
from whiten_index import BuildConfig, build_index, encode_corpus, open_index
from whiten_index.pipeline.build import BuildReport
from whiten_index.progress import Progress


@pytest.fixture
def texts(tmp_path: Path, tiny_words: tuple[str, ...]) -> str:
    """A corpus of two files."""
    folder, random = tmp_path / "corpus", np.random.default_rng(20)
    folder.mkdir()
    for file in range(2):
        texts = [" ".join(random.choice(tiny_words, 6)) + f" {file} {i}" for i in range(40)]
        table = {"id": [f"{file}-{i}" for i in range(40)], "text": texts, "year": range(40)}
        pq.write_table(pa.table(table), folder / f"{file}.parquet")
    return str(folder)


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


def test_rows_of_an_interrupted_shard_count_though_another_shard_has_some_of_its_texts(
    tmp_path: Path, tiny_words: Sequence[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stops(Progress):
        done = 0

        def advance(self, rows: int) -> None:
            self.done += rows
            if self.done > 250:
                raise KeyboardInterrupt

    # The best size of a batch is not known there, so the first ones are small.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    random = np.random.default_rng(21)
    texts = [" ".join(random.choice(tiny_words, 20)) + f" {i}" for i in range(400)]
    texts[250:255] = texts[:5]
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    stopped, whole = (
        BuildConfig(
            corpus=str(tmp_path / "c.parquet"), text_columns="text", model=str(tiny_model),
            store=str(tmp_path / name), shard_rows=200, threads=1,
        )
        for name in ("stopped", "whole")
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt, match="kept 2"):
        encode_corpus(stopped, progress=Stops())
    found, truth = encode_corpus(stopped), encode_corpus(whole)
    assert found.counts.reused > 205
    for part in truth.record.parts:
        np.testing.assert_array_equal(*(e.store.embeddings(part)[:] for e in (found, truth)))
    assert not list(tmp_path.glob("stopped/*/unfinished/*"))


def test_other_ids_or_kept_columns_encode_nothing_again(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    out = tmp_path / "out"
    build(out, texts, **text_options(tiny_model))
    for change in ({"keep": ("year",)}, {"id_column": None}):
        report = build(out, texts, **text_options(tiny_model, **change))
        assert (report.encoded.counts.encoded, report.encoded.counts.reused) == (0, 80)
    hit = open_index(out, device="cpu").search(["the cat"], top_k=1)[0][0]
    assert str(hit.id).endswith(f"#0:{str(hit.id).rpartition(':')[2]}")


def test_a_second_build_reuses_every_passage_and_other_lengths_do_not_mix(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    def passages(**more: Any) -> BuildReport:
        given = {"store": str(tmp_path / "store"), "whiten": "none", "k": None, **more}
        return build(tmp_path / "out", texts, **text_options(tiny_model, **given))

    first, again = passages(passage_tokens=8), passages(passage_tokens=8)
    counts = again.encoded.counts
    assert (counts.encoded, counts.reused) == (0, 80)
    assert counts.passages == first.encoded.counts.passages > 80
    assert again.up_to_date
    alone = build_index(
        BuildConfig(
            store=str(tmp_path / "store"), out=str(tmp_path / "alone"), whiten="none",
            model=str(tiny_model),
        )
    )  # fmt: skip
    assert (alone.encoded.counts.reused, alone.encoded.counts.passages) == (80, counts.passages)
    found = [
        open_index(folder, device="cpu").search(["the cat sat", "a king"], top_k=7)
        for folder in (tmp_path / "out", tmp_path / "alone")
    ]
    assert found[0] == found[1]
    other = passages(passage_tokens=6)
    assert other.encoded.counts.encoded > 0
    assert other.version != first.version
