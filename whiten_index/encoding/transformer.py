"""The loaded model: token ids in, one pooled and unnormalised embedding a text out."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad

from whiten_index.encoding.encoder_config import BackendName
from whiten_index.encoding.model_files import weight_files
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.openvino import OpenVinoStates
from whiten_index.encoding.packing import PackedForward, packing_obstacle, pool_packed
from whiten_index.encoding.pooling import Pooling, mean_layers, pool
from whiten_index.encoding.products import TORCH, use_fastest_products
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.tokenization import code_pin, load_tokenizer, loading_model
from whiten_index.errors import EncoderError

Pool = Callable[[Tensor, Pooling], Tensor]
# Matrix products of so many rows give each row the same bits as those of any more. Measured with
# MKL and oneDNN on x86, one thread: from 16 rows on with AVX-512, from 4 with AVX2. ARM and
# Accelerate are untried.
_FEWEST_ROWS = 64
# From 512 to 4,096 on a CPU the speed differs by 1 % (MiniLM, one thread), and small batches leave
# more that Ctrl-C can keep.
_BATCH_TOKENS_CPU, _BATCH_TOKENS_GPU = 512, 131_072
# Others normalise after their last layer, so the states of a shorter model are not theirs.
_NORMALISED_LAYERS = (
    "bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta",
)  # fmt: skip


class Transformer:
    """A loaded model with its layers, pooling, head and device; threads may share it.

    A batch has ``batch_tokens``, halved whenever memory runs out. It is filled up to
    ``fewest_rows`` tokens, or texts for a head, so that embeddings do not depend on the other
    texts; 0 if they do anyway. ``vocabulary`` is the number of tokens that the model knows, None
    if unknown. With ``one_length`` a batch has texts of one length.
    """

    def __init__(
        self, spec: EncoderSpec, folder: ModelFolder, device: torch.device, backend: BackendName
    ) -> None:
        self.device, on_cpu = device, device.type == "cpu"
        self.tokenizer, model = load_transformer(spec, folder, device)
        self.pad = int(self.tokenizer.pad_token_id or 0)
        config = model.config
        known = model.get_input_embeddings()
        self.vocabulary: int | None = getattr(known, "num_embeddings", None)
        last = folder.layers
        _drop_unused(model, max(spec.layers), last)
        only_last = spec.layers == (last,)
        states = _States(model, None if only_last else spec.layers)
        self._states: Callable[..., list[Tensor]] = states
        self._packed: PackedForward | None = None
        self.batch_tokens = _BATCH_TOKENS_CPU if on_cpu else _BATCH_TOKENS_GPU
        self.one_length = backend == "openvino"
        if self.one_length:
            vocabulary = self.vocabulary or config.vocab_size
            compiled = OpenVinoStates(states, spec.dtype, vocabulary, spec.max_length)
            self._states, self.inputs = compiled, "of one length"
            self.batch_tokens *= min(torch.get_num_threads(), 16)  # a batch has all threads
            self.products = f"OpenVINO {compiled.dtype}"
        else:
            # Texts end to end, without padding, unless something is in the way.
            obstacle = packing_obstacle(model, device, model.dtype)
            self._packed = None if obstacle else PackedForward(model)
            self.inputs = f"padded: {obstacle}" if obstacle else "packed"
            fastest = use_fastest_products(model, spec.dtype, last=only_last) if on_cpu else TORCH
            self.products = fastest
        self.packs = self._packed is not None
        # With padding, and by a GPU's kernels, a text depends on its batch.
        self.fewest_rows = _FEWEST_ROWS if self.packs and on_cpu else 0
        self._pooling, head = spec.pooling, load_head(folder)
        self._head = None if head is None else head.to(device)

    @torch.inference_mode()
    def padded(self, ids: Tensor, mask: Tensor | None, *, prompt_tokens: int = 0) -> Tensor:
        """Return (n, d) float32 on the device, of token ids (n, t) padded on the right.

        Without padding, ``mask`` is None; the first ``prompt_tokens`` are not pooled.
        """
        inputs = {"input_ids": ids, "attention_mask": mask}
        mask = torch.ones_like(ids) if mask is None else mask
        return self._embedded(
            inputs, lambda states, pooling: pool(states, mask, pooling, prompt_tokens=prompt_tokens)
        )

    @torch.inference_mode()
    def packed(
        self, ids: Tensor, lengths: Tensor, offsets: Tensor, longest: int, *, prompt_tokens: int = 0
    ) -> Tensor:
        """Return (n, d) float32 on the device, without padding; see ``PackedForward.inputs``."""
        assert self._packed is not None
        inputs = self._packed.inputs(ids, lengths, offsets, longest)
        return self._embedded(
            inputs,
            lambda states, pooling: pool_packed(
                states[0], offsets, pooling, prompt_tokens=prompt_tokens
            ),
        )

    def _embedded(self, inputs: dict[str, Any], pool: Pool) -> Tensor:
        """Return (n, d) for a model's inputs; ``pool`` takes its states (n, t, d) or (1, T, d)."""
        pooled = pool(mean_layers(self._states(**inputs)), Pooling(self._pooling))
        if self._head is None:
            return pooled
        rows = pad(pooled, (0, 0, 0, max(self.fewest_rows - len(pooled), 0)))
        embeddings: Tensor = self._head(rows)[: len(pooled)]
        return embeddings


class _States(nn.Module):
    """Hidden states (n, t, d) of some layers of a model, or of the last one where none is named."""

    def __init__(self, model: Any, layers: tuple[int, ...] | None) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        # A decoder would otherwise keep keys and values for a next token that never comes.
        self.options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, input_ids: Tensor, **more: Any) -> list[Tensor]:
        inputs = {"input_ids": input_ids, **self.options, **more}
        if self.layers is None:
            return [self.model(**inputs).last_hidden_state]
        found = self.model(**inputs, output_hidden_states=True).hidden_states
        return [found[layer] for layer in self.layers]


def _drop_unused(model: Any, highest: int, last: int) -> None:
    """Drop the layers above the highest that is used, and the pooler: they would only cost time."""
    own = type(model).__module__.startswith("transformers.")
    if own and model.config.model_type in _NORMALISED_LAYERS and hasattr(model, "pooler"):
        model.pooler = None
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == last]
    if highest < last and model.config.model_type in _NORMALISED_LAYERS and len(stacks) == 1:
        # The state below the first layer is the input of that layer.
        del stacks[0][max(highest, 1) :]


def load_transformer(
    spec: EncoderSpec, folder: ModelFolder, device: torch.device
) -> tuple[Any, Any]:
    """Return a model's tokenizer, and the model without a head, for evaluation."""
    tokenizer, on_cpu = load_tokenizer(spec, folder), device.type == "cpu"
    transformers.utils.logging.disable_progress_bar()
    with loading_model(f"model {spec.model}"):
        model, loading = transformers.AutoModel.from_pretrained(
            folder.path,
            # A CPU computes in float32 but for products; float16 is slow there, and only a
            # CPU has int8.
            dtype=getattr(torch, "float32" if on_cpu or spec.dtype == "int8" else spec.dtype),
            trust_remote_code=folder.trust_remote_code,
            local_files_only=folder.local_files_only,
            **code_pin(folder),
            # A pickle may hold code, which never runs.
            weights_only=True,
            output_loading_info=True,
        )
        encoder = model.get_encoder() if model.config.is_encoder_decoder else model
        encoder = encoder.to(device).eval()
        with torch.inference_mode():
            # A wrong value of the configuration may be noticed no sooner.
            encoder(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device))
    # Poolers are left out of many checkpoints and never used here.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise EncoderError(
            f"the weights of {spec.model} lack {len(missing)} tensors (such as {missing[0]}): they "
            "would be random numbers; complete the model folder"
        )
    return tokenizer, encoder


def load_head(folder: ModelFolder) -> nn.Module | None:
    """Return the module from pooled states (n, hidden_size) to embeddings (n, dim)."""
    steps: list[nn.Module] = []
    for dense in folder.head:
        linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
        try:
            tensors: dict[str, Tensor] = {}
            for file in weight_files(dense.path):
                # weights_only: a pickle may hold code, which is never run.
                tensors |= (
                    load_file(file)
                    if file.suffix == ".safetensors"
                    else torch.load(file, map_location="cpu", weights_only=True)
                )
            linear.load_state_dict({k.removeprefix("linear."): v for k, v in tensors.items()})
        except Exception as error:
            # Readers of weights raise all sorts of errors.
            reason = " ".join(str(error).split())[:200]
            raise EncoderError(
                f"the weights of Dense in {dense.path} cannot be used ({reason}); restore the "
                f"folder of model {folder.name}"
            ) from error
        steps += [linear, getattr(nn, dense.activation)()]
    return nn.Sequential(*steps).eval().requires_grad_(False) if steps else None
