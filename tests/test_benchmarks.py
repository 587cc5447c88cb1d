"""What the benchmarks count is what they say they count."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import encoding_peers as peers
from benchmarks import moments, results_file, tables
from benchmarks.encoding import Spent, ratio, timed
from benchmarks.encoding_inputs import model_flops
from whiten_index.encoding.batching import TokenWindow
from whiten_index.moments import Products


def window(lengths: list[int]) -> TokenWindow:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    return TokenWindow(ids, offsets, np.arange(len(lengths)), np.zeros(len(lengths), bool))


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


def test_of_unknown_shapes_no_operations_are_told() -> None:
    assert model_flops({"model_type": "mpnet"}, np.array([3])) is None


@pytest.mark.parametrize("padded", [True, False])
def test_the_bare_model_is_given_every_token_once(padded: bool) -> None:
    tokens = window([40, 9, 9, 7, 7, 3, 1])
    rows = list(peers._cut(tokens, 20, padded=padded))
    assert [i for each in rows for i in range(each.start, each.stop)] == list(range(7))
    held = [int(tokens.lengths[each].sum()) for each in rows]
    assert all(
        count <= 20 or each.stop - each.start == 1 for count, each in zip(held, rows, strict=True)
    )
    setting = peers.Setting("", "cpu", "float32")
    if padded:
        batches = [peers._padded(tokens, each, setting) for each in rows]
        ids = [batch["input_ids"][batch["input_ids"] > 0] for batch in batches]
        assert any(batch["attention_mask"] is None for batch in batches)
    else:
        ids = [peers._packed(tokens, each, setting)[0] for each in rows]
    assert torch.equal(torch.cat(ids).int(), torch.from_numpy(tokens.ids))


def test_ratios_are_of_the_same_round() -> None:
    row = ratio("a / b", [2.0, 30.0, 4.0], [1.0, 10.0, 4.0], clock="cpu")
    assert (row["rounds"], row["median"]) == ([2.0, 3.0, 1.0], 2.0)
    assert (row["least"], row["greatest"], row["clock"]) == (1.0, 3.0, "cpu")


def test_cpu_time_is_that_of_the_work_alone() -> None:
    result, spent = timed(lambda: sum(range(1000)), "cpu")
    assert result == 499_500
    assert isinstance(spent, Spent)
    assert 0 <= spent.cpu < 0.2


def test_all_that_take_moments_take_the_same() -> None:
    pytest.importorskip("sklearn")
    rows = moments.made_rows(500, 6, ratio_of_mean=3.0)
    truth = np.cov(rows.T.astype(float))
    np.testing.assert_allclose(moments.covariance_by_definition(rows), truth, rtol=1e-9, atol=1e-9)
    taking_part = moments.contenders(rows)
    for name in moments.OURS.values():
        np.testing.assert_allclose(taking_part[name]().covariance(), truth, atol=1e-6)
    for batch in (30, 500):
        np.testing.assert_allclose(moments.incremental_pca(rows, batch), truth, atol=1e-4)
    for name in (moments.PEER, moments.PEER_AT_ONCE):
        assert taking_part[name]().n_components_ == 6  # the whole spectrum


def test_products_that_ours_are_compared_with_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way multiplies all rows, two arrays with each other, in the type that it names."""
    rows, seen = moments.made_rows(10_000, 4, ratio_of_mean=1.0), []
    monkeypatch.setattr(moments.np, "matmul", lambda a, b, out: seen.append((a, b, out)))
    for name, run in moments.contenders(rows).items():
        if "gemm" in name:
            seen.clear()
            run()
            assert sum(len(b) for _, b, _ in seen) == 10_000
            assert all(not np.shares_memory(a, b) for a, b, _ in seen)
            expected = np.float64 if name.startswith("dgemm") else np.float32
            assert {x.dtype for each in seen for x in each} == {np.dtype(expected)}


def test_all_run_in_every_round_and_another_begins_each() -> None:
    ran: list[str] = []
    spent = moments.rounds_of({name: partial(ran.append, name) for name in "abc"}, 3)
    assert "".join(ran) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(each) for name, each in spent.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_product_that_ours_are_compared_with_is_the_quicker_of_its_round() -> None:
    names = list(moments.contenders(moments.made_rows(20, 2, ratio_of_mean=1.0)))
    spent = {name: [Spent(2.0, 1.0), Spent(4.0, 2.0)] for name in names}
    spent["dgemm, whole"] = [Spent(1.0, 3.0), Spent(8.0, 1.0)]
    rows = list(moments.results(spent, (1000, 2)))
    found = {(r["name"], r["clock"]): r["rounds"] for r in rows if r["figure"] == "ratio"}
    name = f"speed of {moments.OURS[Products.FLOAT64]} / dgemm"
    assert found[name, "cpu"] == [0.5, 1.0]
    assert found[name, "wall"] == [1.0, 0.5]
    (whole,) = (row for row in rows if row.get("contender") == "dgemm, whole")
    assert whole["rows_per_second"] == 500
    assert whole["gigaflops_as_gemm"] == 2 * 1000 * 2 * 2 / 2 / 1e9


def test_errors_of_moments_are_measured_and_small() -> None:
    pytest.importorskip("sklearn")
    found = {row["contender"]: row["frobenius_error"] for row in moments.accuracy(2000, 12)}
    assert found[moments.OURS[Products.FLOAT64]] < 1e-12
    assert found[moments.OURS[Products.FLOAT32]] < 1e-6


def test_the_table_of_moments_names_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(moments, "timed", lambda run, _: (run(), Spent(2.0, 1.0)))
    rows = list(moments.measure(200, 3, 2))
    monkeypatch.setattr(tables, "read", lambda _: rows)
    table = tables.moments()
    for name in moments.contenders(moments.made_rows(20, 2, ratio_of_mean=1.0)):
        assert f"| {name} | 200 | 0.0 |" in table
    assert "| speed of ours, float32 / sgemm | 1.00 (1.00–1.00) | 1.00 (1.00–1.00) |" in table


def test_results_of_a_run_that_is_not_named_or_of_several_runs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    path = results_file.write("some", [{"figure": 1}])
    results_file.require_sources()
    assert results_file.read("some") == [{"figure": 1}]
    whole = path.read_text()
    path.write_text(whole + whole)
    with pytest.raises(SystemExit, match=r"some\.jsonl holds rows of several runs"):
        results_file.require_sources()
    path.write_text('{"figure": 1}\n')
    with pytest.raises(
        SystemExit, match=r"some\.jsonl does not say its benchmark, commit, command"
    ):
        results_file.require_sources()
