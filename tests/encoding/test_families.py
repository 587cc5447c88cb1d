"""Models of the families people use, against sentence-transformers on the same folders."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.helpers import tiny_models
from tests.helpers.code_models import edit_json
from tests.helpers.tiny_models import POSITIONS, add_modules, copied, dense, load, resolve, texts
from whiten_index.encoding.load_encoder import load_encoder
from whiten_index.encoding.models import ENCODER_CLASSES, find_model
from whiten_index.errors import ConfigError, EncoderError


def assert_alike(found: np.ndarray, expected: np.ndarray, *, scale: bool = False) -> None:
    if scale:
        found = found / np.linalg.norm(found, axis=1, keepdims=True)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / lengths).min() >= 0.99999
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-4)
    # Random models may give all texts one embedding, and then every pooling would be right.
    assert found.std(axis=0).max() > 0.01


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return ``make(family) -> folder`` with the transformer alone; do not write to it."""
    root = tmp_path_factory.mktemp("families")
    made = {}
    return lambda name: made.setdefault(name, tiny_models.FAMILIES[name](root / name))


@pytest.fixture
def bert_with(tiny, tmp_path):
    """Return ``make(*heads, **options) -> folder``: a BERT with modules after the pooling."""
    count = iter(range(100))

    def make(*heads, pooling="mean", **options):
        folder = copied(tiny("bert"), tmp_path / f"model-{next(count)}")
        return add_modules(folder, pooling, *heads, **options)

    return make


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_each_family_agrees_with_sentence_transformers(tiny, tmp_path, family, pooling):
    folder = add_modules(copied(tiny(family), tmp_path / family), pooling)
    encoder, expected = load(folder), tiny_models.truth(folder, texts())
    assert_alike(encoder.encode(texts()), expected)
    # Queries of several lengths share a batch.
    assert_alike(encoder.encode_queries(texts()), expected)


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "longt5", "switch_transformers"])
@pytest.mark.parametrize("both", [False, True])
def test_an_encoder_saved_without_its_decoder(tiny, tmp_path, kind, both):
    """sentence-transformers saves T5 so; older ones left ``is_encoder_decoder`` true."""
    whole = tiny("t5")
    folder = add_modules(copied(whole, tmp_path / "t5"))
    settings = transformers.T5Config.from_pretrained(whole).to_dict()
    config = transformers.AutoConfig.for_model(**{**settings, "model_type": kind})
    made = getattr(transformers, ENCODER_CLASSES[kind])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made(config).save_pretrained(folder)
    edit_json(folder / "config.json", is_encoder_decoder=both)
    assert not [key for key in load_file(folder / "model.safetensors") if "decoder" in key]
    assert_alike(load(folder).encode(texts()), tiny_models.truth(folder, texts()))


@pytest.mark.parametrize(
    ("family", "longest", "default"),
    [
        ("bert", POSITIONS, POSITIONS),
        ("roberta", POSITIONS - 2, POSITIONS - 2),
        ("xlm-roberta", POSITIONS - 2, POSITIONS - 2),
        ("mpnet", POSITIONS - 2, POSITIONS - 2),
        ("modernbert", 8192, 512),
        ("qwen3", 32_768, 512),
    ],
)
def test_the_length_is_the_models_own(tiny, tmp_path, family, longest, default):
    """Without a sentence-transformers length: 512, or what the positions allow below that."""
    found = find_model(str(tiny(family)))
    assert (found.longest, resolve(tiny(family)).max_length) == (longest, default)
    unstated = add_modules(copied(tiny(family), tmp_path / "unstated"), max_length=None)
    assert resolve(unstated).max_length == longest
    edit_json(unstated / "config.json", max_position_embeddings=-1)
    edit_json(unstated / "tokenizer_config.json", model_max_length=None)
    assert resolve(unstated).max_length == 512
    stated = add_modules(copied(tiny(family), tmp_path / "stated"), max_length=40)
    assert resolve(stated).max_length == 40
    assert resolve(stated, max_length=longest).max_length == longest
    assert resolve(stated, max_length=3).max_length == 3
    with pytest.raises(ConfigError, match=f"more than the {longest} tokens"):
        resolve(stated, max_length=longest + 1)
    edit_json(stated / "sentence_bert_config.json", document_length=30, query_length=20)
    with pytest.raises(EncoderError, match=r"sets document_length, query_length in .*not run here"):
        resolve(stated)


ROOM: dict[str, dict[str, object]] = {
    "roberta": {}, "roberta-prelayernorm": {}, "xlm-roberta": {"pad_token_id": 5},
    "xlm-roberta-xl": {}, "xmod": {"default_language": "en_XX"}, "camembert": {"pad_token_id": 0},
    "data2vec-text": {}, "ibert": {}, "longformer": {}, "luke": {"entity_vocab_size": 9},
    "mpnet": {"pad_token_id": 0}, "gpt2": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROOM)
def test_no_longer_text_fits_the_positions(tiny, tmp_path, kind):
    folder = copied(tiny("roberta"), tmp_path / kind)
    options = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}
    options |= {"intermediate_size": 8, "max_position_embeddings": POSITIONS}
    config = transformers.AutoConfig.for_model(kind, **options, **ROOM[kind])
    # Where nothing is said of the padding, transformers has a default.
    settings = config.to_dict()
    if "pad_token_id" not in ROOM[kind]:
        del settings["pad_token_id"]
    tiny_models.write_json(folder / "config.json", settings)
    longest = find_model(str(folder)).longest
    model = transformers.AutoModel.from_config(config).eval()
    with torch.inference_mode():
        model(input_ids=torch.full((1, longest), 7))
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            model(input_ids=torch.full((1, longest + 1), 7))


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size_feed_forward": 2.5},
        {"chunk_size_feed_forward": {}},
        {"hidden_dropout_prob": float("nan")},
        {"is_encoder_decoder": [1]},
        {"num_attention_heads": -1},
    ],
)
def test_a_configuration_that_computes_nothing_is_refused(tiny, tmp_path, change):
    folder = copied(tiny("bert"), tmp_path / "odd")
    edit_json(folder / "config.json", **change)
    with pytest.raises(EncoderError, match="check the folder"):
        load_encoder(str(folder), pooling="mean").encode(["the cat"])


HEADS = {
    "dense": (dense(),),
    "two": (dense(out=48, activation="Identity", bias=False), dense(48, 20, "GELU", seed=1)),
    "wider": (dense(out=80, activation="ReLU"), tiny_models.NORMALIZE),
    "defaults": (("Dense", {"in_features": tiny_models.DIM, "out_features": 16}, dense()[2]),),
}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_a_head_agrees_with_sentence_transformers(bert_with, heads):
    folder = bert_with(*heads)
    normalizes = heads[-1] is tiny_models.NORMALIZE
    encoder = load(folder)
    expected = tiny_models.truth(folder, texts())
    assert encoder.dim == encoder.spec.dim == expected.shape[1]
    assert encoder.spec.normalizes == normalizes
    assert_alike(encoder.encode(texts()), expected, scale=normalizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 48}, "takes 48 numbers and is given 32; restore the folder"),
        ({"in_features": None}, "has no in_features or out_features from 1 to 65,536"),
        ({"out_features": 8}, "the weights of Dense in .* cannot be loaded"),
        ({"out_features": 65_537}, "has no in_features or out_features from 1 to 65,536"),
        ({"out_features": 0}, "has no in_features or out_features from 1 to 65,536"),
        ({"out_features": "16"}, "has no in_features or out_features from 1 to 65,536"),
        ({"activation_function": "os.system"}, r"activation 'os\.system', which is not run"),
        ({"activation_function": "torch.nn.Bilinear"}, "torch.nn.Bilinear., which is not run"),
        ({"module_input_name": "token_embeddings"}, "sets module_input_name to"),
        ({"module_output_name": "other"}, "sets module_output_name to 'other'"),
        ({"use_residual": True}, "sets use_residual to True in 2_Dense, which is not run"),
    ],
)
def test_a_dense_that_cannot_be_applied_is_refused(bert_with, changes, message):
    folder = bert_with(dense())
    edit_json(folder / "2_Dense" / "config.json", **changes)
    with pytest.raises(EncoderError, match=message):
        load(folder) if "weights" in message else resolve(folder)


def test_packed_weights_of_a_dense_are_refused(bert_with):
    """torch packs nothing, and a part of zeros unpacks to a thousand times its size."""
    folder = bert_with(dense()) / "2_Dense"
    expected = load(folder.parent).encode(texts())
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    np.testing.assert_array_equal(load(folder.parent).encode(texts()), expected)
    tiny_models.packed(folder / "pytorch_model.bin")
    with pytest.raises(EncoderError, match=r"Dense in .* cannot be loaded .*it is packed"):
        load(folder.parent)


def two_lists(path: Path) -> Path:
    """Make an archive of which torch reads packed parts, and Python others of the same names."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(found := io.BytesIO(), "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)
    plain, torchs = found.getvalue(), tiny_models.packed(path).read_bytes()
    (size,) = struct.unpack("<I", torchs[-10:-6])
    listed, lead = bytearray(plain[-22 - size : -22]), plain[: -22 - size]
    start = len(torchs) + len(lead)
    # Python adds to each place of a part what lies between the place of the list and the list.
    at = 0
    while at < size:
        lengths = struct.unpack_from("<HHH", listed, at + 28)
        (place,) = struct.unpack_from("<I", listed, at + 42)
        struct.pack_into("<I", listed, at + 42, start + place - len(lead))
        at += 46 + sum(lengths)
    first = torchs[: -22 - size].ljust(start, b"\0") + torchs[-22 - size : -22]
    end = plain[-22:-6] + struct.pack("<I", start) + b"\0\0"
    path.write_bytes(first + lead + listed + end)
    return path


def list_in_a_name(path: Path) -> Path:
    """Make an archive whose list of packed parts is in the name of one that is not."""
    made = tiny_models.packed(path).read_bytes()
    (size,) = struct.unpack("<I", made[-10:-6])
    start, listed = len(made) - 22 - size, made[-22 - size : -22]
    # torch begins to read the list where the end record says, Python so much before the end.
    shift, number = 98, struct.unpack("<H", made[-12:-10])
    name = b"a" * (shift - 46) + listed
    length, kind = 46 + len(name), "<4sHHHHHHIIIHHHHHII"
    one = struct.pack(kind, b"PK\1\2", 20, 20, *[0] * 7, len(name), 0, 0, 0, 0, 0, shift) + name
    place = start + len(one)
    record = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, *number * 2, length, start + shift
    )
    record += struct.pack("<4sIQI", b"PK\6\7", 0, place, 1)
    most = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, *most)
    path.write_bytes(made[:start] + one + record + end)
    return path


@pytest.mark.parametrize("how", [tiny_models.packed, two_lists, list_in_a_name])
def test_packed_weights_are_refused(tiny, tmp_path, how):
    folder = copied(tiny("bert"), tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), path := folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    load(folder).encode(texts())
    with zipfile.ZipFile(how(path)) as file:
        assert {part.compress_type == zipfile.ZIP_STORED for part in file.infolist()} == {
            how is not tiny_models.packed
        }
    with pytest.raises(EncoderError, match=r"cannot be loaded .*it is packed"):
        load(folder)


def test_a_prompt_is_pooled_where_the_model_does_not_say(tiny):
    prompted = load(tiny("bert"), document_prompt="query the ")
    assert_alike(
        prompted.encode(["cat", "a dog"]),
        load(tiny("bert")).encode(["query the cat", "query the a dog"]),
    )
