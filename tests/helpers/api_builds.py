"""Corpora and builds for tests with a model behind an API."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index import BuildConfig, build_index

MODEL = "openai:words"


def texts_of(rows: int) -> list[str]:
    chosen, words = random.Random(0), [f"w{i}" for i in range(300)]
    return [f"{' '.join(chosen.choices(words, k=chosen.randint(2, 20)))} n{i}" for i in range(rows)]


def write(folder: Path, texts: list[str]) -> str:
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet")
    return str(folder / "c.parquet")


def options(folder: Path, url: str | None, **more: Any) -> dict[str, Any]:
    given = {"corpus": str(folder / "c.parquet"), "text_columns": "text", "model": MODEL}
    return {**given, "base_url": url, **more}


def build(folder: Path, url: str, **more: Any) -> Path:
    given = {"out": str(folder / "index"), "whiten": "whitening", "k": 8, "factory": "Flat", **more}
    return build_index(BuildConfig(**options(folder, url, **given))).out
