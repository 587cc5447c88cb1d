"""Sentences, pairs and a small training."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.helpers import sentences
from whiten_index.training.training_config import TrainingConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path_factory.mktemp("sentences") / "s.parquet"
    pq.write_table(pa.table({"text": sentences(200)}), path, row_group_size=50)
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STS-B in small: pairs are the closer the more words they share."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(5)
    first, second = sentences(60, seed=1), sentences(60, seed=2)
    second = [a if rng.random() < 0.3 else b for a, b in zip(first, second, strict=True)]
    shared = [len(set(a.split()) & set(b.split())) for a, b in zip(first, second, strict=True)]
    path = tmp_path_factory.mktemp("pairs") / "sts.parquet"
    pq.write_table(
        pa.table(
            {
                "dataset": ["STS-B"] * 60,
                "subset": ["all"] * 60,
                "split": ["dev"] * 40 + ["test"] * 20,
                "sentence1": first,
                "sentence2": second,
                "score": [min(each, 8) * 5 / 8 for each in shared],
            }
        ),
        path,
    )
    return path


@pytest.fixture
def config(corpus: Path, tiny_model: Path, tmp_path: Path) -> Any:
    return functools.partial(small, corpus, tiny_model, tmp_path / "model")


def small(corpus: Path, model: Path, out: Path, /, **options: Any) -> TrainingConfig:
    given = {
        "corpus": (str(corpus),), "out": str(out), "model": str(model), "groups": 8,
        "batch_size": 16, "max_steps": 6, "eval_steps": 2, "save_steps": 2, "device": "cpu",
        "learning_rate": 1e-3, **options,
    }  # fmt: skip
    return TrainingConfig(**given)


@pytest.fixture(scope="module")
def config_once(
    corpus: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TrainingConfig]:
    """As ``config``, for what the tests of a file share."""
    return functools.partial(small, corpus, tiny_model, tmp_path_factory.mktemp("once") / "model")
