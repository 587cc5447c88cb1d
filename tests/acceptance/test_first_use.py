"""Steps of a first day: what is said meanwhile, what a build costs, one grammar, other files."""

import html
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.acceptance.commands import done, refused, run
from whiten_index.cli import cli, terminal

ROWS, DIM = 400, 32
COLUMNS = ("--embedding-column", "e", "--id-column", "id")


def write(path: Path, rows: int = ROWS, rank: int = DIM) -> Path:
    random = np.random.default_rng(0)
    spread = random.standard_normal((rank, DIM)) / np.sqrt(np.arange(1, DIM + 1))
    pq.write_table(
        pa.table(
            {
                "id": [f"d{row}" for row in range(rows)],
                "e": list((random.standard_normal((rows, rank)) @ spread).astype(np.float32)),
                "day": pa.array(range(19_723, 19_723 + rows), pa.int32()).cast(pa.date32()),
            }
        ),
        path,
    )
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("first") / "c.parquet")


@pytest.fixture(scope="module")
def index(corpus: Path) -> Path:
    out = corpus.parent / "index"
    done("build", corpus, *COLUMNS, "--keep", "day", "--out", out, "--k", 24, "--whiten", "pca")
    return out


def test_a_pipe_has_lines_of_progress(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "EVERY_SECONDS", 1e-4)
    order = ("build", corpus, *COLUMNS, "--out")
    told = run(*order, tmp_path / "a").err
    assert ("encode: " in told, ": 0 of " in told) == (True, False)
    assert "publish" not in run(*order, tmp_path / "b", "-q").err
    monkeypatch.undo()
    assert run(*order, tmp_path / "c").err == ""
    assert "publish: " in run(*order, tmp_path / "d", "-v").err


def test_a_build_says_what_the_reduction_costs(corpus: Path, index: Path, tmp_path: Path) -> None:
    unit = np.stack(pq.read_table(corpus)["e"].to_numpy()).astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    near = np.argsort(-(unit @ unit.T), axis=1)[:, 1:11]
    opened = whiten_index.open_index(index)
    rows = range(0, ROWS, 4)
    share = np.mean(
        [[hit.row in near[row] for hit in opened.search_like(f"d{row}")] for row in rows]
    )
    quality = json.loads(done("inspect", index, "--json"))["quality"]
    assert quality["agreement_at_10"] == pytest.approx(share, abs=0.05)
    narrow = ("--out", tmp_path / "i", "--k", 2, "--whiten", "PCA")
    assert "nearest by raw embeddings" in run("build", corpus, *COLUMNS, *narrow).err


def test_an_update_measures_again_once_a_tenth_of_the_rows_changed(tmp_path: Path) -> None:
    corpus, out = write(tmp_path / "c.parquet"), tmp_path / "i"
    done("build", corpus, *COLUMNS, "--out", out, "--k", 8, "--whiten", "pca", "--factory", "Flat")
    built = json.loads(done("inspect", out, "--json"))["quality"]
    for rows, unchanged in ((420, 400 / 420), (430, 400 / 430), (395, None)):
        write(corpus, rows)
        args = ("--drift-threshold", 99, "--max-shrink", 1, "--json")
        report = json.loads(done("update", out, *args))
        assert report["decision"]["index"] == "keep"
        assert report["quality"].get("unchanged") == (unchanged and pytest.approx(unchanged))
        carried = report["quality"]["agreement_at_10"] == built["agreement_at_10"]
        assert carried == (unchanged is not None)


def test_few_rows_do_not_replace_many_unless_forced(corpus: Path, tmp_path: Path) -> None:
    order = ("build", corpus, *COLUMNS, "--out", tmp_path / "i", "--k", 4)
    done(*order, "--keep", "day")
    assert "keeps day, and this build does not" in run(*order).err
    assert "--force" in refused(9, *order, "--limit", 10)
    done(*order, "--limit", 10, "--force")


def test_the_commands_take_the_index_first(index: Path, tmp_path: Path) -> None:
    done("update", index, "--dry-run")
    assert done("gc", index, "--dry-run").startswith(f"{index}/store: ")
    done("compact", index)
    assert "published version already" in refused(2, "rollback", index, "--to", 1)
    job = tmp_path / "search.toml"
    job.write_text(f'index = "{index}"\nlike = ["d1"]\ntop-k = 2\n')
    assert len(done("search", "--config", job).splitlines()) == 3
    assert "day: 2024-" in done("search", index, "--like", "d1")
    job.write_text("top-kk = 2\n")
    assert "did you mean top_k?" in refused(2, "search", index, "--config", job)
    assert "Example: whiten-index update index" in done("update", "--help")


def test_a_job_file_says_what_the_command_line_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WHITEN_INDEX_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    every: dict[tuple[str, ...], Any] = {(name,): each for name, each in cli.commands.items()}
    every |= {("eval", name): each for name, each in every.pop(("eval",)).commands.items()}
    every.pop(("nightly",))
    for names, command in every.items():
        needed = [one for one in command.params if one.required]
        hidden = {"config", "as_json", "plan", "log", "quiet", "verbose", *needed}
        own = [one for one in command.params if not getattr(one, "group", "")]
        for option in [one for one in own if not {one, one.name} & hidden]:
            words, job = list(names), ""
            for one in (*needed, option):
                is_flag, value = getattr(one, "is_flag", False), getattr(one.type, "choices", "7")
                words += [one.opts[0]] * one.opts[0].startswith("--") + [value[0]] * (not is_flag)
                job += f"{one.opts[0].lstrip('-')} = '{'true' if is_flag else value[0]}'\n"
            more = ["--like", "7"] * (names == ("search",) and option.name != "texts")
            Path("job.toml").write_text(job)
            assert run(*names, "--config", "job.toml", *more) == run(*words, *more), words
    Path("job.toml").write_text("keep = ['title']")
    assert "sets keep to ['title']" in refused(2, "prune", "index", "--config", "job.toml")


def test_filters_take_the_words_of_sql(index: Path) -> None:
    opened = whiten_index.open_index(index)
    for said, rows in (
        ("day >= '2024-01-11' AND NOT id = 'd20'", ROWS - 11),
        ("day IS NOT NULL AND id <> 'd1' and id is not null", ROWS - 1),
        ("id IN ('d1', 'a AND b') OR day = '2024-01-01'", 2),
        ("id IN ('d1') OR id = 'd''2'", 1),
    ):
        assert opened.matches(said) == rows
    wrong = refused(2, "search", index, "--like", "d1", "--filter", "id = 'd1' AND AND day = 1")
    assert "at 'and day == 1'" in wrong


def test_other_files_are_refused_with_what_converts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = pa.table({"text": pa.array(['a\r\ncat, "big"', None], pa.large_string()), "n": [1, 2]})
    lines = '{"text": "a\\r\\ncat, \\"big\\"", "x": {"y": [1]}}\n{"text": null}\n'
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, texts.schema) as writer:
        writer.write_table(texts)
    for kind, write in (
        ("csv", lambda path: pa.csv.write_csv(texts, path)),
        ("json", lambda path: path.write_text('[{"text": "a\\r\\ncat, \\"big\\""}, {"text": 1}]')),
        ("jsonl", lambda path: path.write_text(lines)),
        ("feather", lambda path: pa.feather.write_feather(texts, path)),
        ("arrow", lambda path: path.write_bytes(stream.getvalue())),
    ):
        folder = tmp_path / f"of {kind}[1]"
        (folder / "b").mkdir(parents=True)
        for path in (folder / f"a.{kind}", folder / "b" / f"b.{kind}"):
            write(path)
        for source, rows in ((folder / f"a.{kind}", 2), (folder, 4)):
            said = refused(3, "build", source, "--text-column", "text", "--out", tmp_path / "i")
            exec(shlex.split(said[said.index("-c ") :])[1], {})
            made = pq.ParquetFile(tmp_path / f"{source.stem}.parquet").read()["text"].to_pylist()
            assert (made[0], len(made)) == ('a\r\ncat, "big"', rows)
    (saved := tmp_path / "saved").mkdir()
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        (saved / name).touch()
    said = refused(3, "build", saved, "--text-column", "text", "--out", tmp_path / "i")
    assert f'load_from_disk("{saved}").to_parquet("saved.parquet")' in said


def test_queries_are_read_as_people_have_them(tmp_path: Path, tiny_model: Path) -> None:
    titles = pa.array(["Cats", "Dogs", None])
    texts = pa.table({"text": ["the cat sat", "a dog ran", "blue bird"], "score": titles})
    pq.write_table(texts, tmp_path / "t.parquet")
    keep = ("--keep", "score", "--keep", "text", "--out", tmp_path / "i", "--model", tiny_model)
    told = done("build", tmp_path / "t.parquet", "--text-column", "text", *keep)
    assert told.splitlines()[-1].split()[2:] == [
        *("whiten-index", "search", str(tmp_path / "i"), '"your', 'question"')
    ]
    asked = ["a cat,\n\nor two", 'it said "ran"']
    alone = json.loads(done("search", tmp_path / "i", *asked, "--json"))["results"]
    for name, ids, content in (
        ("q.jsonl", ["0", "1"], "".join(
            json.dumps({"_id": n, "text": text, "more": [1]}) + "\n" for n, text in enumerate(asked)
        )),
        ("q.csv", ["1", "2"], 'query_id,n,query\n1,,"a cat,\n\nor two"\n2,,"it said ""ran"""\n'),
        ("q.tsv", ["7"], '7\tit said "ran"\n'),
        ("q.txt", ["2"], '\nit said "ran"\n'),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        found = json.loads(done("search", tmp_path / "i", "--queries", tmp_path / name, "--json"))
        assert [one.pop("query_id") for one in found["results"]] == ids
        assert found["results"] == alone[-len(ids) :]
    order = ("search", tmp_path / "i", "--queries", tmp_path / "q.csv")
    assert done(*order).startswith("1  a cat,")
    assert "--queries FILE" in run("search", tmp_path / "i", "q.csv").err
    for name, status in (("a.json", 2), ("a.jsonl", 3)):
        (tmp_path / name).write_text('[{"text": "a cat"}]')
        said = refused(status, "search", tmp_path / "i", "--queries", tmp_path / name)
        code = f"{sys.executable} {said[said.index('-c ') :]}"
        subprocess.run(code, shell=True, cwd=tmp_path, check=True)
        lines = ("--queries", tmp_path / "a-lines.jsonl")
        assert done("search", tmp_path / "i", *lines).startswith("1  a cat")
    done(*order, "--run", tmp_path / "r.jsonl")
    lines = [json.loads(line)["hits"] for line in (tmp_path / "r.jsonl").open()]
    assert [[hit["columns"] for hit in hits] for hits in lines] == [
        [hit["columns"] for hit in one["hits"]] for one in alone
    ]
    done(*order, "--run", tmp_path / "r.parquet")
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert [(row["kept_score"], row["text"]) for row in rows] == [
        tuple(hit["columns"].values()) for one in alone for hit in one["hits"]
    ]
    (tmp_path / "q.csv").write_text('id,text\n1,"never closed\n')
    assert "line 2, is no CSV" in refused(3, *order)
    assert "no column title; its columns" in refused(3, *order[:-1], tmp_path / "q.jsonl",
                                                     "--text-column", "title")  # fmt: skip


def test_a_build_says_why_few_rows_take_more_than_raw(corpus: Path, tmp_path: Path) -> None:
    order = ("build", corpus, *COLUMNS, "--whiten", "pca", "--out", tmp_path / "i")
    size = re.compile(r"(?m)^size +(.*)$")
    few = size.findall(done(*order, "--k", 16, "--limit", 20))[0]
    assert "more than the raw embeddings" in few
    least = int(re.findall(r"less than raw from ([\d,]+) rows", few)[0])
    for rows, smaller in ((least, True), (least - 1, False)):
        said = size.findall(done(*order, "--k", 16, "--limit", rows))[0]
        assert ("more than" not in said, ", 64 bytes a row; raw" in said) == (smaller, smaller)
    assert "128 bytes a row, and 128 in" in size.findall(done(*order, "--k", 32))[0]


def test_a_plan_foresees_a_k_above_the_rank(tmp_path: Path) -> None:
    path = write(tmp_path / "low.parquet", rank=6)
    order = ("build", path, *COLUMNS, "--out", tmp_path / "i", "--whiten", "pca")
    assert "rank 6 of a sample" in run(*order, "--k", 8, "--plan").err
    assert "of a sample" not in run(*order, "--k", 0.99999, "--plan").err
    assert re.search("k is 6 and not 10.*--whiten none", run(*order).err)


def test_a_sweep_recommends_a_command_that_runs(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    order = ("sweep", corpus, *COLUMNS, "--out", out, "--k", "8,32", "--codecs", "fp32,sq8")
    found = json.loads(done(*order, "--transforms", "pca", "--indexes", "flat", "--json"))
    command = next(iter(found["recommended"].values()))["command"]
    page = re.sub("<.*?>", "", Path(found["report"]).read_text())
    assert command in html.unescape(page)
    done(*shlex.split(command.replace("INDEX", str(tmp_path / "i")))[1:])


def test_one_text_has_its_hits_and_reprs_are_one_line(tmp_path: Path, tiny_model: Path) -> None:
    pq.write_table(pa.table({"text": ["the cat sat", "a dog ran", "blue bird"]}), tmp_path / "t")
    named = {"corpus": tmp_path / "t", "text_columns": "text", "model": str(tiny_model)}
    report = whiten_index.build_index(whiten_index.BuildConfig(**named, out=tmp_path / "i"))
    opened = whiten_index.open_index(tmp_path / "i", preload=True)
    hits = opened.search("the cat sat", top_k=2)
    assert hits == opened.search(["the cat sat"], top_k=2)[0]
    assert hits.to_arrow().column_names == type(hits)().to_arrow().column_names == ["score", "id"]
    moments = whiten_index.Moments.of(np.eye(3))
    updated = whiten_index.update_index(whiten_index.UpdateConfig(index=str(tmp_path / "i")))
    for each in (report, updated, opened.bundle.whitening, opened.encoder, moments):
        assert len(repr(each)) < 250
