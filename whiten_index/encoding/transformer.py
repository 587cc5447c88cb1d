"""The modules of a model, loaded: tokenizer, transformer, and the layers after the pooling."""

import contextlib
import itertools
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from whiten_index.artifacts.files import open_file, reading
from whiten_index.artifacts.limits import LimitError
from whiten_index.encoding.config_checks import is_quantized
from whiten_index.encoding.model_files import loading_model, weight_files
from whiten_index.encoding.models import ENCODER_CLASSES, ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.tokenization import load_tokenizer
from whiten_index.errors import EncoderError

_MOST_UNPACKED = 1 << 30  # bytes of tensors that are not in the files
# Tensors that are not in the files, and the least bytes of one there, its name among them.
_MOST_MISSING, _TENSOR_BYTES = 1000, 100
# The records that end an archive: that of large ones, the place of it, and that of all.
_END_BYTES = 56 + 20 + 22


class LayerStates(nn.Module):
    """Hidden states (n, t, d) of some layers of a model, or of the last one where none is named."""

    def __init__(self, model: Any, layers: tuple[int, ...] | None) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        # A decoder would otherwise keep keys and values for a next token that never comes.
        self.options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, input_ids: Tensor, **more: Any) -> list[Tensor]:
        """Return the states of token ids (n, t)."""
        inputs = {"input_ids": input_ids, **self.options, **more}
        if self.layers is None:
            return [self.model(**inputs).last_hidden_state]
        found = self.model(**inputs, output_hidden_states=True).hidden_states
        return [found[layer] for layer in self.layers]


def load_transformer(
    spec: EncoderSpec, folder: ModelFolder, device: torch.device
) -> tuple[Any, Any]:
    """Return a model's tokenizer, and the model without a head, for evaluation."""
    tokenizer, on_cpu = load_tokenizer(spec, folder), device.type == "cpu"
    transformers.utils.logging.disable_progress_bar()
    _require_size(folder)
    with loading_model(f"model {spec.model}", folder.path):
        for file in weight_files(folder.path):
            if file.suffix != ".safetensors":
                with open_file(file) as opened:
                    _require_stored(opened)
        alone = _encoder_class(folder)
        model, loading = (alone or transformers.AutoModel).from_pretrained(
            folder.path,
            # A CPU computes in float32 but for products; float16 is slow there.
            dtype=getattr(torch, "float32" if on_cpu else spec.dtype),
            **folder.loading,
            # A pickle may hold code, which never runs.
            weights_only=True,
            output_loading_info=True,
        )
        encoder = model.get_encoder() if alone or model.config.is_encoder_decoder else model
        encoder = unmapped(encoder.to(device).eval())
        with torch.inference_mode():
            # A wrong value of the configuration may be noticed no sooner.
            tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
            width = encoder(input_ids=tokens).last_hidden_state.shape[-1]
    if width != folder.hidden_size:
        raise EncoderError(
            f"{spec.model} gives states of {width:,} numbers, and its config.json says "
            f"{folder.hidden_size:,}; choose a model whose states are as wide"
        )
    require_finite(spec.model, encoder)
    # Poolers are left out of many checkpoints and never used here.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise EncoderError(
            f"the weights of {spec.model} lack {len(missing)} tensors (such as {missing[0]}): they "
            "would be random numbers; complete the model folder"
        )
    return tokenizer, encoder


def unmapped(module: nn.Module) -> nn.Module:
    """Return a module whose tensors are in memory: later writes to mapped files would show."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    return module


def require_finite(name: str, module: nn.Module) -> None:
    """Refuse weights of NaN or infinity: attention and activations make finite numbers of them."""
    # Quantized weights cannot all be asked: numbers of one byte, or tensors of a class of their
    # own, as of torchao. Nor can sparse ones. Buffers that are not saved may be masks of infinity.
    asked = (
        each
        for each in module.state_dict().values()
        if type(each) is Tensor and each.itemsize > 1 and each.layout is torch.strided
    )
    if not all(each.isfinite().all() for each in asked):
        raise EncoderError(f"{name} has weights that are not finite; use another model")


def _encoder_class(folder: ModelFolder) -> Any:
    """Return the class of the encoder alone; None if the model is no such one, or brings code."""
    name = None if folder.has_code else ENCODER_CLASSES.get(str(folder.config.get("model_type")))
    return name and getattr(transformers, name)


def _require_size(folder: ModelFolder) -> None:
    """Refuse a configuration that asks for far more memory than the files of weights have bytes."""
    # Weights of quantized models have a part of a byte for each number.
    if folder.has_code or is_quantized(folder.config):
        return
    with loading_model(f"model {folder.name}", folder.path):
        config = transformers.AutoConfig.from_pretrained(folder.path, **folder.loading)
        files = sum(file.stat().st_size for file in weight_files(folder.path))
        with torch.device("meta"), _at_most(_MOST_MISSING + files // _TENSOR_BYTES):
            alone = _encoder_class(folder)
            model = alone(config) if alone else transformers.AutoModel.from_config(config)
    size = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if size > _MOST_UNPACKED + 4 * files:
        raise EncoderError(
            f"config.json of model {folder.name} describes a model of {size:,} bytes, far more "
            "than its weights; restore the model folder"
        )


@contextlib.contextmanager
def _at_most(tensors: int) -> Iterator[None]:
    """Stop a model that is made in this thread when it has more tensors than its files can hold."""
    thread, made = threading.get_ident(), itertools.count(1)

    def count(*_: Any) -> None:
        if threading.get_ident() == thread and next(made) > tensors:
            raise LimitError("config.json describes far more tensors than its weights have")

    hook = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def load_head(folder: ModelFolder) -> nn.Module | None:
    """Return the module from pooled states (n, hidden_size) to embeddings (n, dim)."""
    steps: list[nn.Module] = []
    for dense in folder.head:
        # Its configuration may claim any width: nothing is allocated before the weights are there.
        linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias, device="meta")
        with loading_model(f"the weights of Dense in {dense.path}", dense.path):
            tensors: dict[str, Tensor] = {}
            for file in weight_files(dense.path):
                with reading(file):
                    tensors |= (
                        load_file(file) if file.suffix == ".safetensors" else load_pickled(file)
                    )
            weights = {k.removeprefix("linear."): v.float() for k, v in tensors.items()}
            linear.load_state_dict(weights, assign=True)
        steps += [linear, getattr(nn, dense.activation)()]
    if not steps:
        return None
    head = unmapped(nn.Sequential(*steps).eval().requires_grad_(False))
    require_finite(folder.name, head)
    return head


def load_pickled(file: Path) -> Any:
    """Return what ``torch.save`` wrote, on the CPU; no code of the pickle runs.

    Raises:
        LimitError: it unpacks to more than its size.
        Exception: of torch, which has no base for those of a damaged file.
    """
    with open_file(file) as opened:
        _require_stored(opened)
        opened.seek(0)
        return torch.load(opened, map_location="cpu", weights_only=True)


def _require_stored(opened: BinaryIO) -> None:
    """Refuse an archive with packed parts, which may unpack to a thousand times their size.

    Python and torch must find the same list of parts, at the place where torch writes it.
    """
    # torch takes a file that begins otherwise for a pickle.
    if opened.read(4) != b"PK\3\4":
        return
    archive = zipfile.ZipFile(opened)
    parts = archive.infolist()
    packed = any(part.compress_type != zipfile.ZIP_STORED for part in parts)
    unpacked, size = sum(part.file_size for part in parts), os.fstat(opened.fileno()).st_size
    opened.seek(max(size - _END_BYTES, 0))
    end = opened.read()
    plain = end[-22:-18] == b"PK\5\6" and end[-2:] == b"\0\0"
    large, place = end[-42:-38] == b"PK\6\7", int.from_bytes(end[-34:-26], "little")
    # Python looks for the list where it must end, torch where the end record says that it begins.
    stated = int.from_bytes(end[48:56] if large else end[-6:-2], "little")
    moved = not plain or stated != archive.start_dir or (large and place != size - _END_BYTES)
    if packed or unpacked > size or moved:
        raise LimitError("it is packed, or its list of parts is not where torch writes it")
