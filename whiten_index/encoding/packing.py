"""A forward pass without padding: texts end to end, and attention that keeps them apart.

The T tokens of n texts go through the model as one row, (1, T). Everything but attention works on
each token alone; attention gets the bounds of the texts, through transformers' own interface. A
hook on a layer sees states of shape (1, T, d).

Models with relative position biases (MPNet, T5, DeBERTa) cannot be packed: the kernel takes none.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from whiten_index.encoding.pooling import Pooling, require_alike
from whiten_index.errors import EncoderError

# The first token of a text has position padding_idx + 1, and padding tokens inside it none.
_FROM_PADDING = frozenset({"roberta", "xlm-roberta", "camembert"})
_FROM_ZERO = frozenset(
    {"bert", "distilbert", "modernbert", "qwen2", "qwen3", "llama", "mistral", "gemma3_text"}
)
PACKABLE = _FROM_PADDING | _FROM_ZERO
_TOKEN_TYPES = _FROM_PADDING | {"bert"}

# transformers takes names with "sdpa", "flash" or "flex" in them for its own.
IMPLEMENTATION = "whiten_index_packed"
_CPU_TRIAL_LENGTH, _TRIAL_LENGTH = 8, 300  # tokens of a text
_TRIAL_ERROR = 0.02
# A window of 4,096 tokens would take a model of 7 billion weights minutes to try.
_LONGEST_CPU_TRIAL = 1024
_CPU_TRIAL_ERROR = 1e-3


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer among the tokens of n texts end to end."""

    cu_seqlens: Tensor  # (n + 1,) int32, beginnings of the texts, T last
    longest: int  # tokens of the longest text
    scale: float | None  # of the scores, None for k ** -0.5
    causal: bool
    window: int | None  # distance in tokens that a token sees, None for its whole text


# Query (T, heads, k), key and value (T, key heads, k), where key heads divide heads, to
# (T, heads, k): no token sees another text.
Kernel = Callable[[Tensor, Tensor, Tensor, Attention], Tensor]


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    """Attend with torch's variable-length FlashAttention; see ``Kernel``."""
    from torch.nn.attention import varlen

    reach = -1 if attention.window is None else attention.window
    # A longest of 1 sends grouped heads down another path, which cannot take empty texts.
    longest = max(attention.longest, 2)
    out = varlen.varlen_attn(
        query,
        key,
        value,
        attention.cu_seqlens,
        attention.cu_seqlens,
        longest,
        longest,
        scale=attention.scale,
        window_size=(reach, 0 if attention.causal else reach),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(Tensor, out)


def sdpa_varlen(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    """Attend with texts of one length together, on any device and in any dtype; see ``Kernel``.

    A text does not depend on the others. It is the kernel of CPUs, and the reference of
    ``torch_varlen``.
    """
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    done = list[Tensor]()
    for start, count, length in _runs(attention.cu_seqlens.tolist()):
        texts = slice(start, start + count * length)
        q, k, v = (
            each[texts].reshape(count, length, *each.shape[1:]).transpose(1, 2)
            for each in (query, key, value)
        )
        window = attention.window
        # A window that a text fits in, and causality alone, need no mask of (length, length).
        seen = None
        if window is not None and length > window + 1:
            seen = torch.ones((length, length), dtype=torch.bool, device=query.device)
            seen = seen.tril_(0 if attention.causal else window).triu_(-window)
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen,
            is_causal=attention.causal and seen is None,
            scale=attention.scale,
        )
        done.append(attended.transpose(1, 2).flatten(0, 1))
    return done[0] if len(done) == 1 else torch.cat(done)


def _runs(bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield first token, texts and length of each run of texts that are equally long."""
    start = 0
    for length, texts in groupby(end - begin for begin, end in pairwise(bounds)):
        count = len(list(texts))
        # A text without tokens has nothing that could attend.
        if length:
            yield start, count, length
        start += count * length


class PackedForward:
    """Runs a model on texts that lie end to end; nothing in it waits for the device.

    The model's padded forward pass stays what it was, and both may run at once in several threads.
    """

    def __init__(self, model: Any, kernel: Kernel | None = None) -> None:
        """Prepare a loaded model of a type in ``PACKABLE``, in evaluation mode."""
        if obstacle := _model_obstacle(model):
            raise EncoderError(obstacle)
        self._model = model
        self._kernel = kernel or (sdpa_varlen if model.device.type == "cpu" else torch_varlen)
        transformers.AttentionInterface.register(IMPLEMENTATION, attend)
        # Padded batches go the usual way.
        transformers.AttentionMaskInterface.register(
            IMPLEMENTATION, transformers.AttentionMaskInterface()["sdpa"]
        )
        model.set_attn_implementation(IMPLEMENTATION)

    def __call__(self, ids: Tensor, lengths: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Return the last hidden states, (T, d); see ``inputs``."""
        inputs = self.inputs(ids, lengths, cu_seqlens, longest)
        states: Tensor = self._model(**inputs).last_hidden_state[0]
        return states

    def inputs(
        self, ids: Tensor, lengths: Tensor, cu_seqlens: Tensor, longest: int
    ) -> dict[str, Any]:
        """Return the arguments with which the model runs packed.

        Texts have token ids (T,), lengths (n,) and bounds (n + 1,) int32; T is at least 1.
        """
        row = ids.unsqueeze(0).long()
        kind = self._model.config.model_type
        starts = cu_seqlens[:-1].long()
        if kind in _FROM_PADDING:
            padding = self._model.config.pad_token_id
            positions = _positions_from_padding(row[0], lengths, starts, padding)
        else:
            positions = _places(starts, lengths, len(ids))
        inputs = {
            "input_ids": row,
            "position_ids": positions.unsqueeze(0),
            # A mask of four dimensions is handed on as it is, so that none is made (which would
            # wait for the device). Attention that used it would fail, being unable to stretch it.
            "attention_mask": torch.empty((1, 1, 0, 0), dtype=torch.bool, device=ids.device),
            "use_cache": False,
            "packing": (cu_seqlens, longest, self._kernel),
        }
        return inputs | ({"token_type_ids": torch.zeros_like(row)} if kind in _TOKEN_TYPES else {})


def packing_obstacle(model: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why a loaded model cannot run without padding, None if it can.

    The model is tried: on a GPU with torch's kernel compared with ``sdpa_varlen`` in every layer;
    on a CPU compared with each text alone. Never raises.
    """
    if device.type != "cpu" and dtype not in (torch.float16, torch.bfloat16):
        return f"{str(dtype).removeprefix('torch.')} is not a half precision"
    try:
        _try_packing(model)
    except EncoderError as error:
        return str(error)
    except Exception as error:
        # Drivers, torch and transformers raise all sorts of errors here.
        return f"{type(error).__name__}: {str(error)[:160]}"
    return None


def pool_packed(states: Tensor, cu_seqlens: Tensor, pooling: Pooling) -> Tensor:
    """Return (n, d) float32 from packed states (T, d), as ``pool`` from padded ones."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if pooling in (Pooling.CLS, Pooling.LAST):
        chosen = starts if pooling is Pooling.CLS else torch.maximum(ends - 1, starts)
        return states[chosen.clamp(max=len(states) - 1)].float()
    states = states.float()
    if pooling is Pooling.MAX:
        lowest = torch.finfo(states.dtype).min
        return _by_text("amax", states, cu_seqlens, empty=lowest)
    weight = torch.ones_like(states[:, :1])
    if pooling is Pooling.WEIGHTED_MEAN:
        weight += _places(starts, ends - starts, len(states)).unsqueeze(-1)
    total = _by_text("sum", weight, cu_seqlens).clamp(min=1)
    mean = _by_text("sum", states * weight, cu_seqlens) / total
    return mean * total.sqrt() if pooling is Pooling.MEAN_SQRT_LENGTH else mean


def _by_text(reduce: str, values: Tensor, cu_seqlens: Tensor, *, empty: float = 0.0) -> Tensor:
    """Reduce each text's tokens, in order, so that sums do not vary: (T, d) -> (n, d)."""
    # Unsafe: the bounds are not checked, which would wait for the device.
    return torch.segment_reduce(
        values, reduce, offsets=cu_seqlens, axis=0, unsafe=True, initial=empty
    )


def _places(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return the place of each token in its text, from 0: (n,), (n,) -> (total,)."""
    first = torch.repeat_interleave(starts, lengths, output_size=total)
    return torch.arange(total, device=starts.device) - first


def _positions_from_padding(ids: Tensor, lengths: Tensor, starts: Tensor, padding: int) -> Tensor:
    """Return positions (T,) counted as RoBERTa does, over tokens that are not ``padding``."""
    real = ids.ne(padding).long()
    count = real.cumsum(0)
    before = pad(count, (1, 0))[starts]
    before = torch.repeat_interleave(before, lengths, output_size=len(ids))
    return (count - before) * real + padding


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: tuple[Tensor, int, Kernel] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: (1, heads, T, k) -> (1, T, heads, k) where packed."""
    if packing is None:
        padded: Callable[..., tuple[Tensor, None]] = transformers.AttentionInterface()["sdpa"]
        return padded(module, query, key, value, attention_mask, **options)
    cu_seqlens, longest, kernel = packing
    causal = options.get("is_causal")
    sliding = options.get("sliding_window")
    attention = Attention(
        cu_seqlens,
        longest,
        scale=options.get("scaling"),
        causal=bool(module.is_causal if causal is None else causal),
        # transformers counts the token itself among those of a window.
        window=None if sliding is None else sliding - 1,
    )
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    return kernel(q, k, v, attention).unsqueeze(0), None


def _model_obstacle(model: Any) -> str | None:
    config = model.config
    kind = config.model_type
    if kind not in PACKABLE or not type(model).__module__.startswith("transformers."):
        return f"a {kind} model ({type(model).__name__}) is not among {', '.join(sorted(PACKABLE))}"
    if config._attn_implementation not in ("sdpa", IMPLEMENTATION):
        return f"its attention is {config._attn_implementation}, not sdpa"
    bidirectional = kind != "modernbert" and not getattr(config, "is_causal", True)
    if bidirectional and getattr(config, "sliding_window", None) is not None:
        # transformers then lets a token see one further than the attention is given.
        return "it is a decoder made bidirectional, with sliding windows"
    return None


@torch.inference_mode()
def _try_packing(model: Any) -> None:
    """Run texts end to end, together longer than the model's positions, and compare."""
    config, on_cpu = model.config, model.device.type == "cpu"
    longest = _CPU_TRIAL_LENGTH if on_cpu else _TRIAL_LENGTH
    longest = max(min(longest, config.max_position_embeddings // 2), 1)
    counts = [longest, longest, 1, (longest + 1) // 2]
    if on_cpu and (window := getattr(config, "sliding_window", None)) is not None:
        # One text is longer than the window, by half of it: of a single token that is not seen,
        # little is left in all states.
        past = window + window // 2 + 2
        if past <= min(_LONGEST_CPU_TRIAL, config.max_position_embeddings):
            counts.append(past)
    lengths, bounds = torch.tensor(counts, device=model.device), [0, *accumulate(counts)]
    ids = torch.arange(bounds[-1], device=model.device) % config.vocab_size
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=model.device)
    before = config._attn_implementation
    forward = PackedForward(model, None if on_cpu else _checked)
    try:
        packed = forward(ids, lengths, cu_seqlens, max(counts))
        if on_cpu:
            alone = [
                model(input_ids=ids[None, begin:end], use_cache=False).last_hidden_state[0]
                for begin, end in pairwise(bounds)
            ]
            require_alike(packed, torch.cat(alone), _CPU_TRIAL_ERROR)
    finally:
        model.set_attn_implementation(before)


def _checked(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
    """Attend with torch's kernel, and raise if it is far from the reference."""
    found = torch_varlen(query, key, value, attention)
    expected = sdpa_varlen(query.double(), key.double(), value.double(), attention)
    require_alike(found, expected, _TRIAL_ERROR)
    return found
