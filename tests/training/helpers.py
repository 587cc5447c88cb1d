"""What the tests of training share."""

import csv

import numpy as np
import torch
from safetensors.torch import load_file

from whiten_index.progress import Progress
from whiten_index.training.train import TrainReport

WORDS = ("cat", "dog", "bird", "fish", "king", "queen", "man", "woman", "river", "house")
VERBS = ("sat", "ran", "flew", "swam", "walks", "sings", "reads", "writes")


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    draw = rng.choice
    return [
        f"the {draw(WORDS)} {draw(VERBS)} on the {draw(('red', 'blue', 'small', 'old'))} "
        f"{draw(WORDS)} and the {draw(WORDS)} {draw(VERBS)}"
        for _ in range(count)
    ]


def weights(report: TrainReport) -> dict[str, torch.Tensor]:
    return load_file(report.out / "model.safetensors")


def require_same(one: TrainReport, other: TrainReport) -> None:
    mine, its = weights(one), weights(other)
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, its[name]), name


class Stops(Progress):
    """Progress of a job that is stopped from outside after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.notes: list[str] = []

    def start(self, name: str, total: int) -> None:
        self.training = name == "train"

    def advance(self, rows: int) -> None:
        if self.training and rows:
            self.left -= rows
            if self.left <= 0:
                raise KeyboardInterrupt

    def note(self, message: str) -> None:
        self.notes.append(message)


def evaluated(report: TrainReport) -> list[tuple[str, ...]]:
    with (report.out / "curves.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["stsb_dev"]]
    return [
        tuple(row[name] for name in ("step", "stsb_dev", "alignment", "uniformity")) for row in rows
    ]
