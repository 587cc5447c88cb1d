"""A trained model as a folder of sentence-transformers."""

from __future__ import annotations

import os
from pathlib import Path

from whiten_index.artifacts.files import walk_files
from whiten_index.encoding.export_st import (
    Module,
    flush,
    pooling_module,
    write_modules,
    write_settings,
    write_transformer,
)
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.training.model import ContrastiveModel


def write_model(
    path: Path,
    model: ContrastiveModel,
    spec: EncoderSpec,
    folder: ModelFolder,
    *,
    keep_head: bool,
) -> None:
    """Write the encoder, its pooling and, where asked for, its head as one ``Dense``.

    The head's whitening by its running moments is affine, and so is what follows it up to tanh:
    together they are one linear map.

    Args:
        path: new.
        model: trained.
        spec: of what it was before.
        folder: likewise, whose tokenizer and settings are copied.
        keep_head: whether embeddings are what comes out of the head.
    """
    path.mkdir()
    write_transformer(path, spec, folder, weights=False)
    settings = (path / "config.json").read_bytes()
    model.encoder.save_pretrained(path)
    # As the model's own, not as transformers writes it anew.
    (path / "config.json").write_bytes(settings)
    modules = [pooling_module(spec, folder.hidden_size)]
    if keep_head:
        weight, bias = model.head.folded()
        config = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        arrays = {
            "linear.weight": weight.detach().float().cpu().numpy(),
            "linear.bias": bias.detach().float().cpu().numpy(),
        }
        modules.append(Module("Dense", config, arrays))
    if spec.normalizes:
        modules.append(Module("Normalize"))
    write_modules(path, modules)
    write_settings(path, spec)
    # Some releases of safetensors write files that none but their owner may read.
    umask = os.umask(0o22)
    os.umask(umask)
    for file in walk_files(path):
        if file.suffix == ".safetensors":
            file.chmod(0o666 & ~umask)
    flush(path)
