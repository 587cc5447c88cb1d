"""Equal fingerprints, equal embeddings: each file and option of a model, changed one by one."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.encoding.hub_server import at_hub
from tests.encoding.test_consent import FLAG
from tests.helpers import tiny_models
from tests.helpers.bad_input import run
from tests.helpers.builds import build_texts
from tests.helpers.code_models import code_model, edit_json, write_texts
from whiten_index import QueryTransform, open_index
from whiten_index.encoding.encoder_config import ApiOptions, EncoderConfig
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.errors import EncoderError

pytestmark = pytest.mark.usefixtures("own_modules")
TEXTS = [*tiny_models.texts(12), "the [CLS] cat <s> sat </s> [SEP] [MASK] on the mat"]
PROMPTS = {"query": "query the ", "document": "passage a "}
Halves = dict[str, tuple[str, np.ndarray]]


def halves(folder: Path, **options: Any) -> Halves:
    """Return fingerprint and embeddings of documents and of queries."""
    encoder = tiny_models.load(folder, **options)
    return {
        "documents": (encoder.spec.fingerprint, encoder.encode(TEXTS)),
        "queries": (encoder.spec.query_fingerprint, encoder.encode_queries(TEXTS)),
    }


def unnoticed(before: Halves, after: Halves) -> list[str]:
    """Return the halves that give other embeddings under the same fingerprint."""
    return [half for half in changed(before, after) if before[half][0] == after[half][0]]


def changed(before: Halves, after: Halves) -> list[str]:
    """Return the halves that give other embeddings."""
    return [
        half
        for half in before
        if before[half][1].shape != after[half][1].shape
        or not np.allclose(before[half][1], after[half][1], atol=1e-5)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one of each: a dense layer after the pooling, prompts, a map of tokens."""
    folder = tiny_models.bert(tmp_path_factory.mktemp("model") / "all")
    # Rows to spare, for tokenizers that add special tokens of their own.
    tensors = load_file(folder / "model.safetensors")
    words = tensors["embeddings.word_embeddings.weight"]
    tensors["embeddings.word_embeddings.weight"] = np.concatenate([words, words[:16] + 1])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", vocab_size=len(words) + 16)
    # As published models have them, whose special tokens are in a file of their own.
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 48}
    tiny_models.write_json(folder / "tokenizer_config.json", settings)
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
    }
    tiny_models.write_json(folder / "special_tokens_map.json", special)
    steps = (tiny_models.dense(), tiny_models.NORMALIZE)
    return tiny_models.add_modules(folder, "mean", *steps, prompts=PROMPTS)


@pytest.fixture(scope="module")
def before(model: Path) -> Halves:
    return halves(model)


def other_value(value: Any) -> Any:
    """Return another value of a JSON setting's kind."""
    match value:
        case bool():
            return not value
        case int():
            return value // 2 if value > 1 else value + 1
        case float():
            return value * 1000 + 0.5
        case str():
            return "cat"
        case _:
            return None if value else True


def json_edits(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield each setting of each JSON file, and what changes it."""

    def edit(file: str, keys: tuple[Any, ...]) -> Callable[[Path], object]:
        def do(copy: Path) -> None:
            whole = inside = json.loads((copy / file).read_text())
            for key in keys[:-1]:
                inside = inside[key]
            inside[keys[-1]] = other_value(inside[keys[-1]])
            (copy / file).write_text(json.dumps(whole))

        return do

    def leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inside in items:
            yield (*keys, key)
            if isinstance(inside, dict | list):
                yield from leaves(inside, (*keys, key))

    for path in sorted(folder.rglob("*.json")):
        file, whole = path.relative_to(folder).as_posix(), json.loads(path.read_text())
        # That of the tokenizer, with its vocabulary, counts as it is.
        for keys in ((key,) for key in whole) if file == "tokenizer.json" else leaves(whole):
            yield f"{file}: {'.'.join(map(str, keys))}", edit(file, keys)


def added(file: str, **settings: Any) -> tuple[str, Callable[[Path], object]]:
    """Return a setting that the model does not have, and what adds it."""
    return f"{file}: {', '.join(settings)}", lambda copy: edit_json(copy / file, **settings)


def scaled(file: Path) -> None:
    tensors = {name: 2 * tensor + 0.1 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


ADDED = (
    added("tokenizer_config.json", split_special_tokens=True),
    added("tokenizer_config.json", tokenizer_class="RobertaTokenizer"),
    added("tokenizer_config.json", do_lower_case=False),
    added("special_tokens_map.json", cls_token="cat"),
    added("special_tokens_map.json", unk_token="dog"),
    added("1_Pooling/config.json", pooling_mode="cls"),
    added("sentence_bert_config.json", do_lower_case=True),
)  # fmt: skip
# These change the embeddings of the model above, so that the test below is known to see something.
SEEN = {
    "tokenizer_config.json: split_special_tokens", "tokenizer_config.json: tokenizer_class",
    "special_tokens_map.json: cls_token", "1_Pooling/config.json: pooling_mode",
    "model.safetensors", "2_Dense/model.safetensors",
    "config.json: layer_norm_eps",
    "sentence_bert_config.json: max_seq_length",
    "config_sentence_transformers.json: prompts.query",
    "config_sentence_transformers.json: prompts.document",
}  # fmt: skip


def test_no_file_of_a_model_changes_embeddings_unnoticed(model, before, tmp_path):
    edits = [*json_edits(model), *ADDED]
    for path in sorted(model.rglob("*.safetensors")):
        file = path.relative_to(model).as_posix()
        edits.append((file, lambda copy, file=file: scaled(copy / file)))
    wrong, seen = [], set()
    for number, (name, edit) in enumerate(edits):
        copy = tiny_models.copied(model, tmp_path / str(number))
        edit(copy)
        try:
            after = halves(copy)
        except KeyboardInterrupt:
            raise
        except BaseException:  # refused, by us or by a library, whose Rust panics: no embeddings
            continue
        finally:
            shutil.rmtree(copy)
        wrong += [f"{name} ({half})" for half in unnoticed(before, after)]
        seen |= {name} if changed(before, after) else set()
    assert not wrong
    assert not SEEN - seen


OPTIONS: dict[str, Any] = {
    "pooling": "max", "layers": (1,), "max_length": 7, "dtype": "bfloat16",
    "backend": "openvino", "threads": 2, "document_prompt": "cold ", "query_prompt": "cold ",
    "trust_remote_code": True,
    "local_files_only": True, "code_revision": "0" * 40,
}  # fmt: skip


def test_no_option_changes_embeddings_unnoticed(model, before):
    elsewhere = {"model", "revision", "device", *ApiOptions.__dataclass_fields__}
    elsewhere |= {"dimensions", "input_types"}  # of a model behind an API
    assert {*OPTIONS, *elsewhere} == set(EncoderConfig.__dataclass_fields__)
    for name, value in OPTIONS.items():
        assert not unnoticed(before, halves(model, **{name: value})), name


@pytest.mark.parametrize("named", ["parts.safetensors", "sub/parts.safetensors"])
def test_weights_that_a_file_names_are_part_of_the_identity(named, tmp_path):
    folder = tiny_models.bert(tmp_path / "model")
    parts = dict.fromkeys(load_file(folder / "model.safetensors"), named)
    (folder / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", folder / named)
    if named == "parts.safetensors":
        (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": parts}
        tiny_models.write_json(folder / "model.safetensors.index.json", index)
    else:
        edit_json(folder / "config.json", transformers_weights=named)
    first = halves(folder)
    scaled(folder / named)
    assert changed(first, after := halves(folder))
    assert not unnoticed(first, after)


def test_choices_without_effect_leave_the_identity_as_it_is(tmp_path, monkeypatch):
    model = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"), prompts={})
    monkeypatch.chdir(tmp_path)
    assert resolve_encoder(EncoderConfig(model="model"))[0].model == str(model)
    plain = halves(model)
    assert plain["documents"][0] == plain["queries"][0]
    prompted = halves(model, query_prompt="cold ")
    assert prompted["documents"][0] == plain["documents"][0] != prompted["queries"][0]
    moved = tiny_models.copied(model, tmp_path / "moved")
    consented = EncoderConfig(model=str(model), trust_remote_code=True)
    assert resolve_encoder(consented)[0].fingerprint == plain["documents"][0]
    spec = tiny_models.resolve(model)
    assert spec.fingerprint == halves(moved)["documents"][0]
    elsewhere = {"model": "m", "revision": "r", "code_revision": "c", "normalizes": True}
    elsewhere["similarity"] = "dot"
    assert replace(spec, **elsewhere).fingerprint == spec.fingerprint
    assert replace(spec, document_prompt="a ").query_fingerprint == spec.query_fingerprint
    assert replace(spec, document_prompt="a ").fingerprint != spec.fingerprint


def test_weights_of_the_identity_are_those_that_are_loaded(tmp_path):
    folder = tiny_models.bert(tmp_path / "model")
    tensors, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    weights = {name: torch.tensor(value) for name, value in load_file(tensors).items()}
    first = halves(folder)
    pickled.write_bytes(b"never read")
    second = halves(folder)
    assert not changed(first, second)
    assert first["documents"][0] == second["documents"][0]
    tensors.unlink()
    torch.save({name: 2 * value + 0.1 for name, value in weights.items()}, pickled)
    third = halves(folder)
    torch.save(weights, pickled)
    fourth = halves(folder)
    assert changed(first, third) == changed(third, fourth) == ["documents", "queries"]
    assert not unnoticed(first, third) + unnoticed(third, fourth)


def build(model: Path, corpus: Path, index: Path, **options: Any) -> None:
    build_texts(index, corpus, model, id_column="id", **options)


def test_a_model_that_has_changed_is_refused(tmp_path):
    prompts = {"query": PROMPTS["query"]}
    model = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"), prompts=prompts)
    index = tmp_path / "index"
    build(model, write_texts(tmp_path), index)
    saved = QueryTransform.of(index).save(tmp_path / "saved")
    assert open_index(index).search(["the cat"])
    edit_json(model / "config.json", layer_norm_eps=0.5)
    for ask in (
        lambda: open_index(index).search(["the cat"]),
        lambda: QueryTransform.load(saved).encode_queries(["the cat"]),
    ):
        with pytest.raises(EncoderError, match="gives other embeddings"):
            ask()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_code_of_a_model_is_part_of_the_identity(elsewhere, tmp_path):
    folder = other = code_model(tmp_path / "model", tmp_path / "mark")
    if elsewhere:
        other = tmp_path / "other"
        other.mkdir()
        shutil.move(folder / "odd.py", other / "odd.py")
        classes = {"AutoConfig": "odd.OddConfig", "AutoModel": "odd.OddModel"}
        named = {name: f"{other}--{each}" for name, each in classes.items()}
        edit_json(folder / "config.json", auto_map=named)
    first = halves(folder, trust_remote_code=True)
    code = (other / "odd.py").read_text()
    more = "\n    def forward(self, *a, **b):\n        out = super().forward(*a, **b)\n"
    more += "        out.last_hidden_state = out.last_hidden_state.flip(-1)\n        return out\n"
    (other / "odd.py").write_text(code + more)
    second = halves(folder, trust_remote_code=True)
    assert changed(first, second) == ["documents", "queries"]
    assert not unnoticed(first, second)
    (folder / "inside").mkdir()
    (folder / "inside" / "words.txt").write_text("the code may read it")
    third = halves(folder, trust_remote_code=True)
    assert third["documents"][0] != second["documents"][0]


@pytest.mark.slow
def test_code_of_another_repository_is_pinned(hub, tmp_path):
    model, code = code_model(tmp_path / "model", tmp_path / "mark"), tmp_path / "code"
    code.mkdir()
    shutil.move(model / "odd.py", code / "odd.py")
    classes = {"AutoConfig": "acme/code--odd.OddConfig", "AutoModel": "acme/code--odd.OddModel"}
    edit_json(model / "config.json", auto_map=classes)
    corpus, index, store = write_texts(tmp_path), tmp_path / "index", tmp_path / "store"
    commit = hub.add("acme/code", code)

    def do(*command: Any) -> str:
        done = at_hub(hub, tmp_path / "home", *command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    encode = ("--text-column", "text", "--store", store, "--model", model, FLAG)
    whiten = ("--whiten", "whitening", "--k", "8")
    do("build", corpus, "--out", index, *whiten, *encode)
    (code / "odd.py").write_text((code / "odd.py").read_text() + "\nMOVED = True\n")
    moved = hub.add("acme/code", code)
    # The index stays with the commit it was built with; a new build takes the new one.
    do("search", index, "the cat", FLAG)
    do("encode", corpus, *encode)
    do("encode", corpus, *encode, "--code-revision", commit)
    found = [json.loads(each.read_text())["encoder"] for each in store.glob("*/manifest.json")]
    assert {each["code_revision"] for each in found} == {commit, moved}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("adapter_config.json", {"peft_type": "LORA"},
            r"adapters \(PEFT\) are not applied here; merge"),
        ("config.json", {"attn_implementation": "acme/fast"}, "acme/fast.*take the setting out"),
        ("config.json",
            {"auto_map": {"AutoConfig": "acme/a--odd.Config", "AutoModel": "acme/b--odd.Model"}},
            r"code from 2 places \(acme/a, acme/b\)"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_pinned_and_adapters_are_refused(file, settings, message, tmp_path):
    folder = tiny_models.bert(tmp_path / "model")
    known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    tiny_models.write_json(folder / file, {**known, **settings})
    with pytest.raises(EncoderError, match=message):
        tiny_models.resolve(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("custom_st.Transformer", "Pooling"), "starts with custom_st.Transformer,"),
        (("Router", "Pooling"), "starts with Router,"),
        (("CLIPModel", "Pooling"), "starts with CLIPModel,"),
        (("Transformer", "WordWeights", "Pooling"), "ends with WordWeights,"),
        (("Transformer", "Pooling", "my.Dense"), "ends with my.Dense,"),
        (("Transformer", "Dense"), "ends with Dense,"),
        (("Transformer", "Pooling", "Normalize", "Dense"), "ends with Normalize,"),
        (("Transformer", "Pooling", "LayerNorm"), "ends with LayerNorm,"),
    ],
)
def test_a_module_that_is_not_run_is_refused(kinds, message, tmp_path):
    folder = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"))
    home = "sentence_transformers.models."
    types = [each if "." in each else home + each for each in kinds]
    paths = ["1_Pooling" if each == "Pooling" else "" for each in kinds]
    modules = [{"type": kind, "path": path} for kind, path in zip(types, paths, strict=True)]
    tiny_models.write_json(folder / "modules.json", modules)
    with pytest.raises(EncoderError, match=f"{message}.*take out modules.json"):
        tiny_models.resolve(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("processing_kwargs", {"text": {"max_length": 6}}),
        ("query_expansion", {"strategy": "fixed", "length": 32}),
        ("transformer_task", "fill-mask"),
        ("modality_config", {"text": {"method": "get_text_features"}}),
        ("model_args", {"num_hidden_layers": 1}),
        ("of_tomorrow", 1),
    ],
)
def test_a_setting_that_is_not_applied_is_refused(setting, value, tmp_path):
    folder = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"))
    edit_json(folder / "sentence_bert_config.json", **{setting: value})
    with pytest.raises(EncoderError, match=f"sets {setting} in .*, which is not run"):
        tiny_models.resolve(folder)


def test_a_prompt_that_is_left_out_of_the_pooling_is_refused(tmp_path):
    folder = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"))
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(EncoderError, match=r"leaves prompts out of its pooling.*is not run"):
        tiny_models.resolve(folder)


def test_settings_that_change_nothing_are_taken(tmp_path):
    folder = tiny_models.add_modules(tiny_models.bert(tmp_path / "model"))
    asked = EncoderConfig(model=str(folder))
    plain = resolve_encoder(asked)[0].fingerprint
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    edit_json(
        folder / "sentence_bert_config.json",
        transformer_task="feature-extraction",
        module_output_name="token_embeddings",
        modality_config={"text": forward, "image": {"method": "get_image_features"}},
        model_args={"trust_remote_code": True},
        tokenizer_args={},
    )
    assert resolve_encoder(asked)[0].fingerprint == plain


def test_rows_that_were_computed_in_two_ways_are_reported(tmp_path, monkeypatch):
    # On any processor.
    monkeypatch.setattr("whiten_index.encoding.products._is_amd_with_avx512", lambda: False)
    corpus, index, store = write_texts(tmp_path), tmp_path / "index", tmp_path / "store"
    folder = tiny_models.bert(tmp_path / "model")
    command = (
        "build", corpus, "--out", index, "--store", store, "--text-column", "text", "--model",
        folder, "--whiten", "whitening", "--k", "8", "--device", "cpu",
    )  # fmt: skip
    code, _, err = run(*command, "--limit", "30")
    assert (code, "different versions" in err) == (0, False), err
    monkeypatch.setattr("whiten_index.encoding.encoder.version", lambda name: f"0.1-{name}")
    code, _, err = run(*command)
    assert code == 0
    told = " ".join(err.split())
    assert "computed by different versions" in told
    assert run("verify", store)[0] == 0
    found = json.loads(run("inspect", index, "--json")[1])["runtimes"]
    names = ("torch", "transformers", "tokenizers", "inputs", "products")
    assert {each.keys() == {*names} for each in found} == {True}
    first = [*map(version, names[:3]), "of one length", "torch"]
    second = [*(f"0.1-{name}" for name in names[:3]), "of one length", "torch"]
    assert sorted([each[name] for name in names] for each in found) == sorted([first, second])
