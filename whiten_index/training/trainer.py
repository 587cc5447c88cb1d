"""Training loop, and checkpoints from which it resumes to the same weights.

The batch, the dropout and the permutations of a step depend on the seed and the number of the step
alone. So a checkpoint holds weights, the state of the optimiser and the curves, and no state of a
random generator. It is a folder ``checkpoint-STEP``, written as a whole.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whiten_index.artifacts.atomic import discard
from whiten_index.artifacts.files import exists, is_out_of_memory, list_folder, reading
from whiten_index.artifacts.manifest import (
    Described,
    Schema,
    check_files,
    new_artifact,
    read_manifest,
)
from whiten_index.encoding.transformer import load_pickled
from whiten_index.errors import ArtifactError, ConfigError, EncoderError, StorageError, first_line
from whiten_index.progress import Stages
from whiten_index.training.contrastive_model import Collator, ContrastiveModel
from whiten_index.training.training_config import BEST, CURVES, TrainingConfig

_LOG_STEPS, _MOST_NORM = 25, 1.0
_WEIGHTS, _BEST_WEIGHTS, _STATE = "model.safetensors", "best.safetensors", "state.pt"
_REMEDY = "remove the folder of checkpoints to train from the start"
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Score = Callable[[ContrastiveModel], Mapping[str, float]]
Curves = list[dict[str, float]]


class _Checkpoint(Described):
    training: dict[str, Any]
    step: int


_SCHEMA = Schema("checkpoint", 1, _Checkpoint)
_OF_WRITER = re.compile("inline_container|iostream|Parent directory")


# Losses since the last row of the curves, and those rows.
_LOGGED = TypeAdapter(tuple[list[float], list[dict[str, int | float]]])


def run(
    config: TrainingConfig,
    model: ContrastiveModel,
    sentences: Sequence[str],
    collator: Collator,
    *,
    score: Score | None,
    folder: Path,
    identity: Mapping[str, Any],
    stages: Stages,
) -> tuple[dict[str, Any], Curves]:
    """Train a model in place, from its last checkpoint in ``folder`` if there is one.

    Return the facts for the report, and the curves. The model has the weights of ``best_step``.
    """
    an_epoch = len(sentences) // config.batch_size
    total = config.max_steps or max(round(an_epoch * config.epochs), 1)
    state = _State(config, model)
    resumed = state.load(folder)
    if resumed > total:
        raise ArtifactError(f"{folder} has a checkpoint of step {resumed} of {total}; {_REMEDY}")
    if not state.curves and score is not None:
        # The weights before training are no candidate for the best.
        state.curves.append({"step": 0, "epoch": 0.0, **score(model)})
    scored = min(config.eval_steps, total)
    logged = min(_LOG_STEPS, scored)
    with stages.stage("train", total) as watcher:
        watcher.advance(resumed)
        for step in range(resumed + 1, total + 1):
            try:
                _seed(config.seed, step)
                rows = _rows(config, len(sentences), step)
                state.learn(collator([sentences[row] for row in rows]), 1 - (step - 1) / total)
                row: dict[str, float] = {"step": step, "epoch": step / an_epoch}
                if step == 1 or step % logged == 0 or step == total:
                    row |= state.logged()
                if score is not None and step % scored == 0:
                    row |= state.scored(score)
                state.end(row)
                watcher.advance(1)
            except KeyboardInterrupt:
                state.save(folder, identity)
                raise
            if step % config.save_steps == 0 or step == total:
                state.save(folder, identity)
    if state.best:
        model.load_state_dict(state.best)
    _require_finite(model)
    best = state.best_row
    facts = {
        "steps": total,
        "best_step": int(best["step"]) if best else total,
        BEST: best[BEST] if best else None,
        "stsb_dev_before": next((row[BEST] for row in state.curves if BEST in row), None),
        "resumed_at": resumed,
    }
    return facts, [{name: row[name] for name in CURVES if name in row} for row in state.curves]


class _State:
    def __init__(self, config: TrainingConfig, model: ContrastiveModel) -> None:
        gpu = config.device != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda" if gpu else "cpu")
        self._model, self._type = model.to(self._device), _TYPES.get(config.precision)
        self._rate = config.learning_rate
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=self._rate, weight_decay=0.0)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=config.precision == "fp16")
        self._step, self._whole = 0, True
        self._losses = list[float]()
        self.curves: Curves = []
        self.best: dict[str, Tensor] = {}  # weights, empty if none were scored

    @property
    def best_row(self) -> Mapping[str, float] | None:
        scored = (row for row in self.curves if row["step"] and row.get(BEST, math.nan) > -math.inf)
        return max(scored, key=lambda row: row[BEST], default=None)

    def learn(self, batch: Mapping[str, Tensor], share: float) -> None:
        """Take a step, at a share of the learning rate."""
        rate = share * self._rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        try:
            with torch.autocast(self._device.type, self._type, enabled=self._type is not None):
                loss = self._model(**{name: each.to(self._device) for name, each in batch.items()})
            self._scaler.scale(loss).backward()
        except torch.OutOfMemoryError as error:
            raise EncoderError(
                "the GPU's memory is full; take smaller batches, shorter sentences or fewer "
                "positives"
            ) from error
        # From here to ``end`` this is between two steps.
        self._whole = False
        self._losses.append(loss.item())
        if not math.isfinite(self._losses[-1]):
            raise _diverged()
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._model.parameters(), _MOST_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def logged(self) -> dict[str, float]:
        mean = math.fsum(self._losses) / len(self._losses)
        self._losses.clear()
        return {"loss": mean, "learning_rate": self._optimizer.param_groups[0]["lr"]}

    def scored(self, score: Score) -> Mapping[str, float]:
        """Return the scores of the weights, and keep these if they are the best."""
        _require_finite(self._model)
        try:
            found = score(self._model)
        except ConfigError as error:
            # The same pairs could be ranked before.
            raise _diverged() from error
        best = self.best_row
        if found[BEST] > (best[BEST] if best else -math.inf):
            weights = self._model.state_dict().items()
            self.best = {name: each.to("cpu", copy=True).contiguous() for name, each in weights}
        return found

    def end(self, row: dict[str, float]) -> None:
        """End a step, of which a row without figures is not kept."""
        if "loss" in row or BEST in row:
            self.curves.append(row)
        self._step, self._whole = int(row["step"]), True

    def save(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Write a checkpoint and remove those before, unless a step was cut off halfway."""
        path = folder / f"checkpoint-{self._step}"
        if not self._whole or not self._step:
            return
        with written(path), new_artifact(path) as (inside, fields):
            weights = self._model.state_dict().items()
            save_file({name: each.contiguous() for name, each in weights}, inside / _WEIGHTS)
            if self.best:
                save_file(self.best, inside / _BEST_WEIGHTS)
            state = {
                "optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict(),
                "losses": self._losses, "curves": self.curves,
            }  # fmt: skip
            torch.save(state, inside / _STATE)
            fields |= _SCHEMA.headed(training=dict(identity), step=self._step)
        for each in checkpoints(folder)[:-1]:
            discard(each)

    def load(self, folder: Path) -> int:
        """Take over the last checkpoint, if there is one, and return its step."""
        if not (found := checkpoints(folder)):
            return 0
        path = found[-1]
        try:
            with reading(path):
                state = load_pickled(path / _STATE)
                self._optimizer.load_state_dict(state["optimizer"])
                self._scaler.load_state_dict(state["scaler"])
                given = state["losses"], state["curves"]
                self._losses, self.curves = _LOGGED.validate_python(given, strict=True)
                _ = self.best_row  # each row of them has a step
                self._model.load_state_dict(load_file(path / _WEIGHTS))
                if exists(path / _BEST_WEIGHTS):
                    # The file is mapped, and goes with its checkpoint.
                    best = load_file(path / _BEST_WEIGHTS)
                    self.best = {name: each.clone() for name, each in best.items()}
        except (OSError, StorageError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # torch and safetensors raise errors of many kinds.
            raise ArtifactError(
                f"{path} cannot be loaded ({first_line(error)}); {_REMEDY}"
            ) from error
        self._step = _step_of(path)
        return self._step


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, by their steps."""
    found = [each for each in list_folder(folder) if re.fullmatch(r"checkpoint-\d+", each.name)]
    return sorted(found, key=_step_of)


def checked_identity(folder: Path) -> Mapping[str, Any] | None:
    """Return the identity of the training that the last checkpoint is of, after checking it."""
    if not (found := checkpoints(folder)):
        return None
    path = found[-1]
    fields = read_manifest(path, _SCHEMA, remedy=_REMEDY, missing=_REMEDY)
    check_files(path, fields, content=True, remedy=_REMEDY)
    if fields["step"] != _step_of(path):
        raise ArtifactError(f"{path} is the checkpoint of step {fields['step']}; {_REMEDY}")
    return fields["training"]


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Turn every writer's error of a full disk into a ``StorageError``."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch reports where its writer failed. Its other errors are of the device.
        of_device = isinstance(error, RuntimeError) and not _OF_WRITER.search(str(error))
        if of_device or is_out_of_memory(error):
            raise
        raise StorageError(
            f"cannot write {folder} ({first_line(error)}); mend that or make room, and run the "
            "same command again (checkpoints are kept)"
        ) from error


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _seed(seed: int, step: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]))


def _rows(config: TrainingConfig, count: int, step: int) -> list[int]:
    """Return the numbers of the sentences of a step; each epoch has another order."""
    epoch, place = divmod(step - 1, count // config.batch_size)
    order = _order(config.seed, epoch, count)
    rows: list[int] = order[place * config.batch_size :][: config.batch_size].tolist()
    return rows


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _require_finite(model: nn.Module) -> None:
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise _diverged()


def _diverged() -> EncoderError:
    return EncoderError(
        "the training diverged: its numbers are not finite any more, or all embeddings are the "
        "same; take a smaller learning rate, and name another --out or remove the checkpoints"
    )
