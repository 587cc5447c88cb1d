"""The sets that the papers score on: read once, each known by a digest."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.papers.recipes import Measure
from pipelines.papers.transfer_tasks import Task, read_task
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.errors import ConfigError
from whiten_index.evaluation.sts_sets import StsSet, chosen_sets, read_sts

VARIABLE = "WHITEN_INDEX_DATA"
_PAIRS, _TASKS = Path("sts") / "sts_raw.parquet", Path("senteval")
_SICK = {"SICK-R": "test"}


@dataclass
class Data:
    """The public sets.

    Attributes:
        folder: of the sets, in the layout that ``WHITEN_INDEX_DATA`` has; None for that one.
    """

    folder: Path | None = None
    _sets: list[StsSet] | None = field(default=None, repr=False)
    _tasks: dict[str, Task | None] = field(default_factory=dict, repr=False)
    _digests: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def pairs_path(self) -> Path:
        """The file of sentence pairs."""
        return self.path(_PAIRS)

    @property
    def splits(self) -> dict[str, str]:
        """The splits to score that ``eval sts`` would not take by itself."""
        return {n: s for n, s in _SICK.items() if n in {each.name for each in self.sets()}}

    def path(self, name: Path) -> Path:
        """Return the path of a file.

        Raises:
            ConfigError: it is not there, or no folder is named.
        """
        if self.folder is None:
            return data_path(str(name))
        if not (self.folder / name).exists():
            raise ConfigError(f"--data {self.folder} has no {name}; name the folder that has it")
        return self.folder / name

    def sets(self) -> list[StsSet]:
        """Return the sets of sentence pairs, SICK-R scored on its test split.

        Raises:
            WhitenIndexError: they cannot be read.
        """
        if self._sets is None:
            first = read_sts([self.pairs_path])
            splits = {n: s for n, s in _SICK.items() if n in {each.name for each in first}}
            self._sets = read_sts([self.pairs_path], splits=splits) if splits else first
        return self._sets

    def task(self, name: str) -> Task | None:
        """Return a transfer task, or RTE; None where its file is not there."""
        if name not in self._tasks:
            try:
                path = self.task_path(name)
            except ConfigError:
                self._tasks[name] = None
            else:
                self._tasks[name] = read_task(path)
        return self._tasks[name]

    def task_path(self, name: str) -> Path:
        """Return the file of a task, as the papers call it.

        Raises:
            ConfigError: it is not there.
        """
        return self.path(_TASKS / f"{name.lower()}.parquet")

    def dev_pairs(self) -> list[StsSet]:
        """Return STS-B scored on dev, of which alignment and uniformity are."""
        return chosen_sets(read_sts([self.pairs_path], splits={"STS-B": "dev"}), ["STS-B"])

    def texts(self, measure: Measure, names: list[str]) -> list[str]:
        """Return all texts of an evaluation, in the order in which they are encoded."""
        if measure is Measure.STS:
            return [text for each in self.sets() for text in each.texts]
        found = [self.task(name) for name in names]
        return [text for each in found if each is not None for text in each.texts]

    def digest(self, each: StsSet | Task) -> str:
        """Return what a set is known by in kept results."""
        if id(each) not in self._digests:
            self._digests[id(each)] = fingerprint(
                {name: _plain(value) for name, value in vars(each).items()}
            )
        return self._digests[id(each)]


def _plain(value: object) -> object:
    """Return a set's field as JSON has it."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def data_path(name: str) -> Path:
    """Return the path of a public file or folder, such as ``sts/sts_raw.parquet``."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise ConfigError(
            f"no data is named and {VARIABLE} is not set; name the files, or set it to the folder "
            f"that holds {name}"
        )
    path = Path(folder) / name
    if not path.exists():
        raise ConfigError(f"{VARIABLE} is {folder}, which has no {name}; name the files instead")
    return path
