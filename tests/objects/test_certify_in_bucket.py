"""A certificate of an index in a bucket is the one of the same index in a folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.objects.helpers import build
from whiten_index import (
    CertifyConfig,
    UpdateConfig,
    certify_index,
    list_versions,
    open_index,
    update_index,
)
from whiten_index.cli import cli

pytestmark = pytest.mark.service


def test_machines_certify_update_and_verify_an_index(
    bucket: str, machine: Any, tmp_path: Path, tiny_model: Path, tiny_words: tuple[str, ...]
) -> None:
    rng, corpus = np.random.default_rng(0), tmp_path / "c.parquet"
    rows = [
        {"id": str(n), "title": f"t{n}", "text": " ".join(rng.choice(tiny_words, 12))}
        for n in range(60)
    ]
    asked = [{"id": row["id"], "text": row["text"][: 20 + n % 30]} for n, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(asked), tmp_path / "q.parquet")
    judged = [{"query-id": row["id"], "corpus-id": row["id"], "score": 1} for row in rows[5:]]
    pq.write_table(pa.Table.from_pylist(judged), tmp_path / "qrels.parquet")
    files = {"queries": str(tmp_path / "q.parquet"), "qrels": str(tmp_path / "qrels.parquet")}
    out, made = f"s3://{bucket}/index", list[Any]()
    encoder = {"embedding_column": None, "text_columns": ("text",), "model": str(tiny_model)}
    for place in (out, str(tmp_path / "folder")):
        machine("first")
        pq.write_table(pa.Table.from_pylist(rows), corpus)
        build(str(corpus), out=place, **encoder)
        machine("second")
        certified = certify_index(CertifyConfig(index=place, threads=1, **files))
        manifest = open_index(place).bundle.manifest
        assert manifest["version"] == certified["version"]
        assert manifest["certificate"] == certified["certificate"]
        machine("third")
        pq.write_table(pa.Table.from_pylist(rows[1:]), corpus)
        given = {"refit": "never", "certify_gate": 100, "threads": 1}
        gated = update_index(UpdateConfig(index=place, **given)).manifest["certificate"]
        made.append((certified["certificate"], gated, len(list_versions(place))))
    assert made[0] == made[1]
    assert made[0][0]["questions"] == 55
    machine("fourth")
    options = ["--queries", files["queries"], "--qrels", files["qrels"]]
    run = CliRunner().invoke(cli, ["verify", out, "--certificate", *options])
    assert run.exit_code == 0, run.output
    assert f"index {out}: its certificate holds" in run.output
