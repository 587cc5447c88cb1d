"""What the benchmarks count is what they say they count."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import moments, results_file, small_codes_page
from benchmarks.encoding_inputs import model_flops


def test_operations_are_those_that_torch_counts() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter:
        for length in (5, 17):
            model(input_ids=torch.ones((1, length), dtype=torch.long))
    assert model_flops(config.to_dict(), np.array([5, 17])) == counter.get_total_flops()


def test_errors_of_moments_are_measured_and_small() -> None:
    pytest.importorskip("sklearn")
    found = {row["contender"]: row["frobenius_error"] for row in moments.accuracy(2000, 12)}
    assert found[moments.OURS] < 1e-12


def test_results_of_a_run_that_is_not_named_or_of_several_runs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    monkeypatch.setattr(results_file, "_commit", lambda: "5c1f00d")
    path = results_file.write("some", [{"figure": 1}])
    results_file.require_sources()
    assert results_file.read("some") == [{"figure": 1}]
    whole = path.read_text()
    path.write_text(whole.replace("5c1f00d", "5c1f00d-dirty"))
    with pytest.raises(SystemExit, match=r"some\.jsonl was measured with changed files"):
        results_file.require_sources()
    path.write_text(whole + whole)
    with pytest.raises(SystemExit, match=r"some\.jsonl holds rows of several runs"):
        results_file.require_sources()
    path.write_text('{"figure": 1}\n')
    with pytest.raises(
        SystemExit, match=r"some\.jsonl does not say its benchmark, commit, command"
    ):
        results_file.require_sources()


def test_the_charts_of_small_codes_are_those_of_the_results() -> None:
    page = small_codes_page.page()
    rows = results_file.read("small_codes")
    assert len(re.findall("<tr id=", page)) == len(rows) > 20
    for row in rows:
        assert f"{row['mean']:.2f}" in page, row["setting"]
