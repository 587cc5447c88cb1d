"""Tiny random models of the families people use, as sentence-transformers folders.

Each has d = 32, 2 layers, 4 heads and a tokenizer of its family's kind: special tokens, padding
side and positions are those of the published models; words and weights are not.
"""

import json
import shutil
import string
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import load_encoder, resolve_encoder
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.window_encoder import WindowEncoder

DIM = 32
POSITIONS = 48
_WORDS = (
    "the", "cat", "sat", "on", "mat", "query", "passage", "instruct", "given", "dog", "ran", "to",
    "a", "small", "river", "and", "sang", "king", "queen", "walks", "writes", "book", "cold",
)  # fmt: skip
_SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.3,
}
Special = tuple[str, ...]


def texts(count: int = 24) -> list[str]:
    """Return texts of 1 to 60 words, some beyond the limit, some of letters no vocabulary has."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.r_[rng.integers(1, 12, count - 5), rng.integers(40, 61, 3)])
    plain = [" ".join(rng.choice(_WORDS, size=n)) for n in lengths]
    return [*plain, "The CAT sat; on Größe, 東京 🙂!", "x"]


def _letters() -> str:
    return string.ascii_lowercase + string.digits + ".,:;!?'"


def _word_piece(special: Special) -> Tokenizer:
    letters = _letters()
    tokens = dict.fromkeys((*special, *letters, *(f"##{each}" for each in letters), *_WORDS))
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next(token for token in special if "unk" in token.lower())
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _byte_level(special: Special) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        for size in range(1, len(word)):
            merges[word[:size], word[size]] = None
        merges["Ġ", word] = None
    tokens = dict.fromkeys((*special, *alphabet, *("".join(pair) for pair in merges)))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _unigram(special: Special) -> Tokenizer:
    pieces = dict.fromkeys((*special, "▁", *_letters(), *(f"▁{word}" for word in _WORDS)))
    scores = [(piece, -float(index) / 10) for index, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=list(pieces).index("<unk>")))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def _framed(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """Put special tokens around every text, as ``template`` such as ``[CLS] $A [SEP]`` says."""
    framing = [part for part in template.split() if part != "$A"]
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(framing)]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def _fast(tokenizer: Tokenizer, **options: Any) -> transformers.PreTrainedTokenizerFast:
    # Published tokenizers often name no limit, which is written as 1e30.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"model_max_length": 10**30, **options}
    )


_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BERT_NAMES = {f"{token[1:-1].lower()}_token": token for token in _BERT_SPECIAL}
_ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_ROBERTA_NAMES = {
    "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
    "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
}  # fmt: skip


def bert(folder: Path) -> Path:
    tokenizer = _fast(_framed(_word_piece(_BERT_SPECIAL), "[CLS] $A [SEP]"), **_BERT_NAMES)
    return _save(folder, tokenizer, transformers.BertConfig, max_position_embeddings=POSITIONS)


def roberta(folder: Path) -> Path:
    tokenizer = _fast(_framed(_byte_level(_ROBERTA_SPECIAL), "<s> $A </s>"), **_ROBERTA_NAMES)
    return _save(folder, tokenizer, transformers.RobertaConfig, max_position_embeddings=POSITIONS)


def xlm_roberta(folder: Path) -> Path:
    tokenizer = _fast(_framed(_unigram(_ROBERTA_SPECIAL), "<s> $A </s>"), **_ROBERTA_NAMES)
    return _save(
        folder, tokenizer, transformers.XLMRobertaConfig, max_position_embeddings=POSITIONS
    )


def mpnet(folder: Path) -> Path:
    tokenizer = _fast(_framed(_word_piece(_ROBERTA_SPECIAL), "<s> $A </s>"), **_ROBERTA_NAMES)
    return _save(folder, tokenizer, transformers.MPNetConfig, max_position_embeddings=POSITIONS)


def modern_bert(folder: Path) -> Path:
    """Layers look far and near by turns; here near is 8 tokens, so that texts are longer."""
    tokenizer = _fast(_framed(_byte_level(_BERT_SPECIAL), "[CLS] $A [SEP]"), **_BERT_NAMES)
    return _save(
        folder, tokenizer, transformers.ModernBertConfig,
        max_position_embeddings=8192, local_attention=8, global_attn_every_n_layers=2,
        pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3,
    )  # fmt: skip


def qwen3(folder: Path) -> Path:
    """A decoder as Qwen3-Embedding: padded on the left, by the token that also ends each text."""
    end = "<|endoftext|>"
    tokenizer = _fast(
        _framed(_byte_level((end, "<|im_end|>")), f"$A {end}"),
        pad_token=end, eos_token="<|im_end|>", padding_side="left", model_max_length=131_072,
    )  # fmt: skip
    return _save(
        folder, tokenizer, transformers.Qwen3Config,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32_768, pad_token_id=0,
    )  # fmt: skip


def t5(folder: Path, config: type = transformers.T5Config) -> Path:
    """An encoder with a decoder, of which embeddings take the encoder alone."""
    special = ("<pad>", "</s>", "<unk>")
    tokenizer = _fast(
        _framed(_unigram(special), "$A </s>"),
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
    return _save(
        folder, tokenizer, config,
        d_kv=8, d_ff=64, num_decoder_layers=1, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "bert": bert, "roberta": roberta, "xlm-roberta": xlm_roberta, "mpnet": mpnet,
    "modernbert": modern_bert, "qwen3": qwen3, "t5": t5,
    "umt5": partial(t5, config=transformers.UMT5Config),
}  # fmt: skip


def _save(folder: Path, tokenizer: Any, config: type, **options: Any) -> Path:
    tokenizer.save_pretrained(folder)
    settings = config(**{**_SIZES, "vocab_size": len(tokenizer), **options})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(settings)
        # Every bias starts at nought and every norm at one, which would hide one left out.
        for vector in (each for each in model.parameters() if each.dim() == 1):
            vector += 0.1 * torch.randn_like(vector)
    model.save_pretrained(folder)
    return folder


def add_modules(
    folder: Path,
    pooling: str | dict[str, Any] = "mean",
    *heads: tuple[str, dict[str, Any], dict[str, torch.Tensor]],
    prompts: dict[str, str] | None = None,
    max_length: int | None = 24,
) -> Path:
    """Write what makes a transformer's folder one of sentence-transformers.

    Args:
        folder: with the transformer and its tokenizer.
        pooling: its mode, or the whole configuration.
        heads: type, configuration and weights of each further module.
        prompts: by name.
        max_length: tokens a text.
    """
    asked = {"pooling_mode": pooling} if isinstance(pooling, str) else pooling
    kinds = ["Transformer", "Pooling", *(kind for kind, _, _ in heads)]
    names = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": name, "type": f"sentence_transformers.models.{kind}"}
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / names[1] / "config.json", {"word_embedding_dimension": DIM, **asked})
    for name, (_, config, weights) in zip(names[2:], heads, strict=True):
        write_json(folder / name / "config.json", config)
        if weights:
            save_file(weights, folder / name / "model.safetensors")
    if max_length is not None:
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length})
    if prompts is not None:
        write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    return folder


def dense(
    width: int = DIM, out: int = 16, activation: str = "Tanh", *, bias: bool = True, seed: int = 0
) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    """Return a Dense module with random weights, as ``add_modules`` takes it."""
    home = "linear" if activation == "Identity" else "activation"
    config = {
        "in_features": width,
        "out_features": out,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{home}.{activation}",
    }
    random = torch.Generator().manual_seed(seed)
    weights = {"linear.weight": torch.randn(out, width, generator=random) / width**0.5}
    if bias:
        weights["linear.bias"] = torch.randn(out, generator=random)
    return "Dense", config, weights


NORMALIZE: tuple[str, dict[str, Any], dict[str, torch.Tensor]] = ("Normalize", {}, {})


def load(model: Path | str, **options: Any) -> WindowEncoder:
    """Return an encoder on one thread, which is quickest and disturbs no other test."""
    return load_encoder(str(model), **{"device": "cpu", "threads": 1, **options})


def resolve(model: Path | str, **options: Any) -> EncoderSpec:
    return resolve_encoder(EncoderConfig(model=str(model), **options))[0]


def copied(source: Path, folder: Path) -> Path:
    """Return a copy of a model's folder, to be written to."""
    return Path(shutil.copytree(source, folder))


def write_json(path: Path, value: object) -> None:
    """Write JSON, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def truth(folder: Path, sentences: Sequence[str], **options: Any) -> np.ndarray:
    """Return what sentence-transformers makes of sentences, (n, d)."""
    # Not skipped where it is missing: it comes with the embedded extra, as in every test run.
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return np.asarray(model.encode(list(sentences), batch_size=7, **options))


def packed(path: Path) -> Path:
    """Pack the parts of a file of ``torch.save``, which are not packed."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return path
