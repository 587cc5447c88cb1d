"""The forward pass without padding: the same states as the padded one, with the right kernel."""

from itertools import accumulate

import pytest
import torch
import transformers

from whiten_index.encoding.packing import (
    PACKABLE,
    Attention,
    PackedForward,
    packing_obstacle,
    pool_packed,
    sdpa_varlen,
)
from whiten_index.encoding.pooling import Pooling, pool
from whiten_index.errors import EncoderError

# 43 tokens, more than any model below has positions; the longest outreaches every window.
LENGTHS = [7, 20, 1, 13, 2]
COMMON = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 24, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
GEMMA = GROUPED | {"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 9}
DISTIL = {"dim": 64, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

MODELS = {
    "bert": ("bert", {}),
    "bert decoder": ("bert", {"is_decoder": True}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "camembert": ("camembert", {}),
    "distilbert": ("distilbert", DISTIL),
    "modernbert": ("modernbert", {"local_attention": 6, "pad_token_id": 0}),
    "modernbert odd": ("modernbert", {"local_attention": 7, "pad_token_id": 0}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2 sliding": ("qwen2", {"num_key_value_heads": 2} | SLIDING),
    "qwen3": ("qwen3", GROUPED),
    "qwen3 sliding": ("qwen3", GROUPED | SLIDING),
    "qwen3 bidirectional": ("qwen3", GROUPED | {"is_causal": False}),
    "llama": ("llama", GROUPED),
    "mistral": ("mistral", GROUPED | {"sliding_window": 5}),
    "mistral whole": ("mistral", GROUPED | {"sliding_window": None}),
    "gemma3_text": ("gemma3_text", GEMMA),
    "gemma3_text bidirectional": ("gemma3_text", GEMMA | {"use_bidirectional_attention": True}),
}


def make(name, **changes):
    """Return a random model in evaluation mode; ``changes`` go into its configuration."""
    kind, options = MODELS[name]
    if kind == "distilbert":
        kept = ("vocab_size", "max_position_embeddings", "initializer_range")
        common = {key: COMMON[key] for key in kept}
    else:
        common = COMMON
    config = transformers.AutoConfig.for_model(kind, **{**common, **options, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModel.from_config(config).eval()


@pytest.fixture(params=MODELS)
def model(request):
    return make(request.param)


def batch(lengths=LENGTHS, *, device="cpu"):
    """Return ids, lengths, cu_seqlens and longest of random texts."""
    random = torch.Generator().manual_seed(1)
    # Token 1 is RoBERTa's padding, and may stand inside a text.
    ids = torch.randint(1, 50, (sum(lengths),), generator=random)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return ids.to(device), torch.tensor(lengths).to(device), cu_seqlens.to(device), max(lengths)


def padded_states(model, ids, lengths, **options):
    """Return the model's output for the padded batch, and its mask."""
    rows = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64, device=ids.device)
    mask = (torch.arange(rows.shape[1], device=ids.device) < lengths[:, None]).long()
    rows[mask == 1] = ids
    with torch.inference_mode():
        return model(input_ids=rows, attention_mask=mask, **options), mask


def test_every_packable_type_is_tested():
    assert {kind for kind, _ in MODELS.values()} == PACKABLE


def test_packed_states_equal_padded_ones(model):
    texts = batch()
    padded, mask = padded_states(model, *texts[:2])
    forward = PackedForward(model, sdpa_varlen)
    with torch.inference_mode():
        states = forward(*texts)
    expected = padded.last_hidden_state[mask == 1]
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 3, 4])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_reference_is_softmax_over_what_a_token_sees(causal, window, scale):
    random = torch.Generator().manual_seed(0)
    query = torch.randn(8, 4, 16, generator=random)
    key, value = torch.randn(2, 8, 2, 16, generator=random)
    bounds = torch.tensor([0, 5, 6, 8], dtype=torch.int32)
    found = sdpa_varlen(query, key, value, Attention(bounds, 5, scale, causal, window))
    text = [0, 0, 0, 0, 0, 1, 2, 2]
    for i in range(8):
        seen = [j for j in range(8) if text[j] == text[i]]
        seen = [j for j in seen if window is None or abs(i - j) <= window]
        seen = [j for j in seen if not causal or j <= i]
        for head in range(4):
            scores = key[seen, head // 2] @ query[i, head] * (0.25 if scale is None else scale)
            expected = scores.softmax(0) @ value[seen, head // 2]
            torch.testing.assert_close(found[i, head], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pooling", Pooling)
def test_packed_pooling_equals_padded_pooling(pooling):
    _, lengths, cu_seqlens, longest = batch()
    padded = torch.randn(5, longest, 6, generator=torch.Generator().manual_seed(0)) - 2
    mask = (torch.arange(longest) < lengths[:, None]).long()
    expected = pool(padded, mask, pooling)
    found = pool_packed(padded[mask == 1], cu_seqlens, pooling)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("bert", {"attn_implementation": "eager"}, "eager"),
        ("mistral", {"is_causal": False}, "bidirectional"),
    ],
)
def test_models_that_pad_anywhere(name, changes, reason):
    model = make(name, **changes)
    assert reason in packing_obstacle(model, CPU, torch.float32)
    with pytest.raises(EncoderError, match=reason):
        PackedForward(model)


def assert_alike(found, expected):
    """Random models make much of rounding: on a CPU, single bfloat16 tokens differ by 0.001."""
    cosines = torch.cosine_similarity(found, expected)
    assert cosines.mean() >= 0.999
    assert cosines.min() >= 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel_of_torch_on_a_gpu(model, dtype):
    """Only there: torch's kernel against the padded pass, and no wait for the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = model.to(device, dtype)
    assert packing_obstacle(model, device, dtype) is None
    for lengths in (LENGTHS, [1, 1, 1], [20]):
        texts = batch(lengths, device=device)
        padded, mask = padded_states(model, *texts[:2])
        expected = padded.last_hidden_state[mask == 1].float()
        forward = PackedForward(model)
        with torch.inference_mode():
            forward(*texts)
            torch.cuda.set_sync_debug_mode("error")
            try:
                states = forward(*texts)
                pooled = {pooling: pool_packed(states, texts[2], pooling) for pooling in Pooling}
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert states.dtype == dtype
        assert_alike(states.float(), expected)
        for pooling, found in pooled.items():
            assert_alike(found, pool(padded.last_hidden_state, mask, pooling))
