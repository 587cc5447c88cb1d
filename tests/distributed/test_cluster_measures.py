"""What is measured of a corpus encoded on a cluster is what one machine measures."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.helpers.corpora import write_judged
from whiten_index.cli import cli
from whiten_index.evaluation.judgements import parquet_corpus

pytestmark = pytest.mark.service
# What another run changes, and digests of it.
_OF_A_RUN = {"seconds", "stage_rows", "time", "latency_ms", "throughput", "build", "digest"}
SWEEP = ("--transforms", "auto,pca", "--codecs", "fp32,sq8", "--indexes", "flat,ivf")


def lasting(found: Any) -> Any:
    """Return what is measured, but for times."""
    if isinstance(found, list):
        return [lasting(each) for each in found]
    if not isinstance(found, dict):
        return found
    return {name: lasting(each) for name, each in found.items() if name not in _OF_A_RUN}


@pytest.mark.parametrize("command", ["retrieval", "sweep"])
def test_the_figures_are_those_of_one_machine(
    three_nodes: Any, tiny_model: Path, tiny_words: Any, tmp_path: Path, command: str
) -> None:
    beir = write_judged(tmp_path / "one", tiny_words, grades=(2, 1))
    corpus = parquet_corpus(beir / "corpus.jsonl", tmp_path)
    model = ("--model", tiny_model, "--device", "cpu", "--threads", 1, "--k", 8)
    both = []
    for runner in ("local", "ray"):
        out = tmp_path / runner
        words = ["eval", "retrieval", beir, *model, "--k", 4, "--store", out]
        if command == "sweep":
            words = ["sweep", corpus, "--text-column", "text", *model, *SWEEP, "--out", out]
        words += ["--runner", runner, *(["--address", three_nodes.address] * (runner == "ray"))]
        done = CliRunner().invoke(cli, [*map(str, words), "--json"])
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert "encode/load encoder" in said["seconds"]
        lines = (out / "results.jsonl").read_text().splitlines() if command == "sweep" else []
        both.append(list(map(json.loads, lines)) or said)
    assert lasting(both[1]) == lasting(both[0])
