"""The training loop, which is that of Hugging Face's Trainer: what is ours is what it is told."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from whiten_index.artifacts.atomic import replace_file
from whiten_index.artifacts.files import writing
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.progress import Stages
from whiten_index.training import checkpoints
from whiten_index.training.contrastive_model import ContrastiveModel
from whiten_index.training.sentences import Collator, Sentences
from whiten_index.training.training_config import BEST, Precision, TrainingConfig

_COLUMNS = ("step", "epoch", "loss", "learning_rate", BEST, "alignment", "uniformity")
_LOG_STEPS = 25

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

    Raises:
        StorageError: checkpoints cannot be written.
        EncoderError: the training diverges, or a GPU's memory is full.
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
    last = checkpoints.last_whole(folder)
    resumed = 0 if last is None else checkpoints.step_of(last)
    with stages.stage("train", total) as watcher:
        telling = _Telling(watcher.advance, total=total, score=score)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(telling)
        watcher.advance(resumed)
        if last is not None and resumed >= total:
            # It was cut off between its last step and its end.
            trainer.state = TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))
            checkpoints.load(last, model)
        else:
            _train(trainer, last)
    if telling.stopped is not None:
        raise telling.stopped
    rows = curves(trainer.state.log_history)
    best = best_of(rows)
    if best is not None:
        checkpoints.load_best(folder, int(best["step"]), model)
    _require_finite(model)
    return Trained(
        steps=trainer.state.global_step,
        best_step=int(best["step"]) if best else trainer.state.global_step,
        best=best[BEST] if best else None,
        curves=rows,
        resumed=resumed,
    )


def _train(trainer: Trainer, last: Path | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except torch.OutOfMemoryError as error:
        raise EncoderError(
            "the GPU's memory is full; take smaller batches, shorter sentences, fewer positives or "
            "fewer passes through the encoder"
        ) from error


def _require_finite(model: ContrastiveModel) -> None:
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise _diverged()


def _diverged() -> EncoderError:
    return EncoderError(
        "the training diverged: its numbers are not finite any more, or all embeddings are the "
        "same; take a smaller learning rate, and name another --out or remove the checkpoints"
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


def best_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    """Return the row of the best evaluation, the first of equals; None where there was none.

    That of step 0 is none: nothing was trained.
    """
    scored = [row for row in rows if row["step"] and not math.isnan(row.get(BEST, math.nan))]
    return max(scored, key=lambda row: row[BEST], default=None)


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

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with checkpoints.written(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the scores, log them, and keep the weights if they are the best."""
        assert self._score is not None
        _require_finite(self.model)
        try:
            found = self._score(self.model)
        except ConfigError as error:
            # The same pairs could be ranked before.
            raise _diverged() from error
        scores = {f"eval_{name}": float(value) for name, value in found.items()}
        self.log(dict(scores))
        best, step = best_of(curves(self.state.log_history)), self.state.global_step
        if best is not None and best["step"] == step:
            folder = Path(self.args.output_dir)
            with checkpoints.written(folder):
                checkpoints.save_best(folder, step, self.model)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, scores
        )
        return scores


class _Telling(TrainerCallback):  # type: ignore[misc]
    """Tells of each step, and stops in good order, with a checkpoint, where that asks for it."""

    def __init__(self, advance: Callable[[int], None], *, total: int, score: Score | None) -> None:
        self._advance, self._total, self._score = advance, total, score
        self.stopped: KeyboardInterrupt | None = None

    def on_train_begin(self, args: Any, state: Any, _: Any, **told: Any) -> None:
        """Score the model as it was, beside the checkpoints: it is none of them."""
        # A checkpoint tells that of the command that made it.
        state.save_steps = args.save_steps
        if state.global_step == 0 and self._score is not None:
            scores = {f"eval_{name}": value for name, value in self._score(told["model"]).items()}
            state.log_history.append({"epoch": 0.0, "step": 0, **scores})

    def on_save(self, args: Any, state: Any, _: Any, **__: Any) -> None:
        """Mark a checkpoint as whole, and drop those that are not needed any more."""
        folder = Path(args.output_dir)
        with writing(folder, kept="earlier checkpoints are kept"):
            made = folder / f"checkpoint-{state.global_step}"
            best = best_of(curves(state.log_history))
            checkpoints.keep(folder, made, int(best["step"]) if best else None)

    def on_log(self, _: Any, __: Any, ___: Any, **told: Any) -> None:
        """Stop where numbers are not finite any more."""
        loss = (told.get("logs") or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            raise _diverged()

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """Stop where that is asked for; tell the loss up to each checkpoint and to the end."""
        try:
            self._advance(1)
        except KeyboardInterrupt as error:
            self.stopped = error
            control.should_save = control.should_training_stop = True
        # Sums of losses are no part of a checkpoint.
        if control.should_save or state.global_step == self._total:
            control.should_log = True


def _arguments(
    config: TrainingConfig, folder: Path, *, total: int, every: int, score: Score | None
) -> TrainingArguments:
    there = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=config.batch_size,
        max_steps=total,
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup * total),
        weight_decay=config.weight_decay,
        bf16=config.precision is Precision.BF16,
        fp16=config.precision is Precision.FP16,
        use_cpu=config.device == "cpu" or not there,
        seed=config.seed,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        # A sum that is NaN is to be seen.
        logging_nan_inf_filter=False,
        max_grad_norm=config.max_grad_norm,
        logging_first_step=True,
        logging_steps=min(_LOG_STEPS, every),
        save_steps=config.save_steps,
        eval_strategy="no" if score is None else "steps",
        eval_steps=every,
    )
    # Whitening is over a batch, and seeds are for one device: more of them are not used.
    _ = arguments.device
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _quiet() -> None:
    """Keep the library's own reports off a user's terminal."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
