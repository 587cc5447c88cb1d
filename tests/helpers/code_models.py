"""A model folder with Python code of its own, which leaves a mark whenever it runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers import tiny_models
from whiten_index.artifacts.files import sha256_file
from whiten_index.artifacts.manifest import write_manifest

_CODE = """
from pathlib import Path
from transformers import BertConfig, BertModel

def mark():
    Path({mark!r}).write_text("the model's code ran")

mark()

class OddConfig(BertConfig):
    model_type = "odd-bert"

    def __init__(self, **options):
        mark()
        super().__init__(**options)

class OddModel(BertModel):
    config_class = OddConfig
"""
TEXTS = tiny_models.texts(40)


def code_model(folder: Path, mark: Path) -> Path:
    """Write a BERT that only its own code can load; that code writes the file ``mark``."""
    tiny_models.bert(folder)
    (folder / "odd.py").write_text(_CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "odd.OddConfig", "AutoModel": "odd.OddModel"}
    edit_json(folder / "config.json", model_type="odd-bert", auto_map=classes)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_texts(folder: Path) -> Path:
    """Write a corpus of ids and texts."""
    path = folder / "corpus.parquet"
    ids = [f"d{i}" for i in range(len(TEXTS))]
    pq.write_table(pa.table({"id": ids, "text": TEXTS}), path)
    return path


def forged(index: Path, folder: Path, **encoder: Any) -> Path:
    """Return a copy of an index whose manifest says other things of the encoder; digests fit."""
    shutil.copytree(index, folder)
    current = json.loads((folder / "CURRENT").read_text())
    version = folder / "versions" / current["version"]
    fields = json.loads((version / "manifest.json").read_text())
    fields["config"] |= {key: encoder[key] for key in ("model", "revision") if key in encoder}
    fields["config"]["trust_remote_code"] = True
    fields["encoder"] |= encoder
    seal(version / "manifest.json", fields)
    seal(folder / "CURRENT", {**current, "manifest_sha256": sha256_file(version / "manifest.json")})
    return folder


def seal(path: Path, fields: dict[str, Any]) -> None:
    """Write a manifest with the digest of what it says now."""
    write_manifest(path, {key: value for key, value in fields.items() if key != "digest"})
