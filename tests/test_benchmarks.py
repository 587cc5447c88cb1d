"""What the encoding benchmark counts is what it says it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import encoding_peers as peers
from benchmarks.encoding import Spent, ratio, timed
from benchmarks.encoding_inputs import model_flops
from whiten_index.encoding.batching import TokenWindow


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
