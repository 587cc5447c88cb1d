"""The training loop, which is that of Hugging Face's Trainer: what is ours is what it is told."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.collector import collector_held_back
from whiten_index.manifest import replace_file, writing
from whiten_index.progress import Stages
from whiten_index.training.config import Precision, TrainingConfig
from whiten_index.training.model import ContrastiveModel
from whiten_index.training.sentences import Collator, Sentences

with collector_held_back():
    import transformers
    from transformers import (
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainingArguments,
    )
    from transformers.trainer_utils import get_last_checkpoint

BEST = "stsb_dev"
_COLUMNS = ("step", "epoch", "loss", "learning_rate", BEST, "alignment", "uniformity")
_LOG_STEPS, _CHECKPOINTS_KEPT = 25, 2

Score = Callable[[ContrastiveModel], Mapping[str, float]]


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        steps: that were done, resumed ones counted.
        best_step: whose weights the model has now.
        best: its score, None where nothing was evaluated.
        curves: step by step, see ``write_curves``.
        resumed: step it was taken up at, 0 from the start.
    """

    steps: int
    best_step: int
    best: float | None
    curves: Sequence[Mapping[str, float]]
    resumed: int


def run(
    config: TrainingConfig,
    model: ContrastiveModel,
    sentences: Sentences,
    collator: Collator,
    *,
    score: Score | None,
    folder: Path,
    stages: Stages,
) -> Trained:
    """Train a model in place, from the last of the checkpoints below ``folder`` if there are any.

    Args:
        config: of the training.
        model: on the CPU; the trainer moves it.
        sentences: to train on.
        collator: makes batches.
        score: what the model is worth, by name: ``BEST``, alignment, uniformity. None for never.
        folder: of checkpoints, of this training alone.
        stages: told of the steps.

    Raises:
        OutputError: checkpoints cannot be written.
    """
    per_epoch = len(sentences) // config.batch_size
    total = config.max_steps or max(round(per_epoch * config.epochs), 1)
    every = min(config.eval_steps, total)
    _quiet()
    trainer = _Trainer(
        model=model,
        args=_arguments(config, folder, total=total, every=every, score=score),
        train_dataset=sentences,
        # Pairs of sentences and scores, which only ``score`` knows.
        eval_dataset=None if score is None else sentences,
        data_collator=collator,
        score=score,
    )
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    resumed = 0 if last is None else int(last.rsplit("-", 1)[1])
    with stages.stage("train", total) as watcher, writing(folder):
        telling = _Telling(watcher.advance, total=total, score=score)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(telling)
        watcher.advance(resumed)
        trainer.train(resume_from_checkpoint=last)
    if telling.stopped is not None:
        raise telling.stopped
    state = trainer.state
    best = state.best_model_checkpoint
    return Trained(
        steps=state.global_step,
        best_step=state.global_step if best is None else int(str(best).rsplit("-", 1)[1]),
        best=state.best_metric,
        curves=curves(state.log_history),
        resumed=resumed,
    )


def curves(history: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return what was logged, one row a step, the names of evaluation without their prefix."""
    rows: dict[int, dict[str, float]] = {}
    for entry in history:
        row = rows.setdefault(int(entry["step"]), {})
        row |= {name.removeprefix("eval_"): value for name, value in entry.items()}
    return [
        {name: row[name] for name in _COLUMNS if name in row}
        for _, row in sorted(rows.items())
        if "loss" in row or BEST in row
    ]


def write_curves(path: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Write curves as CSV, empty where a step has no such value."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue().encode())


class _Trainer(Trainer):  # type: ignore[misc]
    """Evaluates by a function of the model."""

    def __init__(self, *, score: Score | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._score = score
        self.control: TrainerControl

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the scores, and log them."""
        assert self._score is not None
        self.model.eval()
        scores = {f"eval_{key}": float(value) for key, value in self._score(self.model).items()}
        self.model.train()
        self.log(dict(scores))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, scores
        )
        return scores


class _Telling(TrainerCallback):  # type: ignore[misc]
    """Tells of each step, and stops in good order, with a checkpoint, where that asks for it."""

    def __init__(self, advance: Callable[[int], None], *, total: int, score: Score | None) -> None:
        self._advance, self._total, self._score = advance, total, score
        self.stopped: KeyboardInterrupt | None = None

    def on_train_begin(self, _: Any, state: Any, __: Any, **told: Any) -> None:
        """Score the model as it was, beside the checkpoints: it is none of them."""
        if state.global_step == 0 and self._score is not None:
            scores = {f"eval_{name}": value for name, value in self._score(told["model"]).items()}
            state.log_history.append({"epoch": 0.0, "step": 0, **scores})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate and save at the last step too, whatever the rhythm."""
        try:
            self._advance(1)
        except KeyboardInterrupt as error:
            self.stopped = error
            control.should_save = control.should_training_stop = True
            return
        if state.global_step == self._total:
            control.should_evaluate = args.eval_strategy != "no"
            control.should_save = control.should_log = True


def _arguments(
    config: TrainingConfig, folder: Path, *, total: int, every: int, score: Score | None
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=config.batch_size,
        max_steps=total,
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup * total),
        weight_decay=config.weight_decay,
        bf16=config.precision is Precision.BF16,
        fp16=config.precision is Precision.FP16,
        use_cpu=config.device == "cpu",
        seed=config.seed,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=["tensorboard"] if config.tensorboard else [],
        logging_steps=min(_LOG_STEPS, every),
        save_steps=every,
        save_total_limit=_CHECKPOINTS_KEPT,
        eval_strategy="no" if score is None else "steps",
        eval_steps=every,
        load_best_model_at_end=score is not None,
        metric_for_best_model=None if score is None else BEST,
        greater_is_better=None if score is None else True,
    )


def _quiet() -> None:
    """Keep the library's own reports off a user's terminal."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
