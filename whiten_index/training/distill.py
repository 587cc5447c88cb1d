"""A static model made from a Transformer by model2vec."""

from pathlib import Path

from whiten_index.artifacts.atomic import replace_folder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import local_model
from whiten_index.errors import ConfigError, EncoderError, first_line, require_installed


def distill_model(model: str, out: Path | str, *, dims: int | None = None) -> Path:
    """Write a static model, whose table has what a Transformer gives each token alone.

    Rows are rotated to their principal directions and weighted by Zipf's law, as model2vec does.

    Args:
        model: name or folder of the Transformer.
        out: folder that is written, which ``--model`` takes.
        dims: directions that are kept, all by default: an index reduces them by whitening.

    Raises:
        ConfigError: the folder exists, or the model has fewer dims.
        EncoderError: the model cannot be loaded, or is behind an API.
    """
    require_installed("model2vec", "skeletoken", by="distill", extra="distill")
    spec, folder = local_model(EncoderConfig(model=model), by="distill")
    if dims is not None and not 1 <= dims <= folder.hidden_size:
        raise ConfigError(
            f"--dims {dims} is not from 1 to the {folder.hidden_size} of {spec.model}; give fewer"
        )

    pooling = {"mean": "mean", "cls": "first", "last": "last"}.get(spec.pooling)
    if pooling is None or folder.head:
        raise ConfigError(
            f"{spec.model} pools by {spec.pooling} or has own steps after that, which model2vec "
            "does not apply; name another model"
        )

    def make(path: Path) -> None:
        import torch
        from model2vec.distill import distill_from_model

        from whiten_index.encoding.transformer import load_transformer

        tokenizer, transformer = load_transformer(spec, folder, torch.device("cpu"))
        try:
            made = distill_from_model(
                transformer, tokenizer, device="cpu", pca_dims=dims or "auto",
                quantize_to="float32", pooling=pooling,
            )  # fmt: skip
        except (ValueError, TypeError, NotImplementedError, KeyError) as error:
            raise EncoderError(
                f"model2vec cannot distill {spec.model} ({first_line(error)}); name another model"
            ) from error
        if dims is not None and made.dim != dims:
            raise ConfigError(f"{spec.model} has too few tokens for --dims {dims}; leave it out")
        made.save_pretrained(path)

    return replace_folder(out, make, files=lambda _: None, what="an empty folder")
