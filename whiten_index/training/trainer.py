"""Training loop: Hugging Face's Trainer, with our scores and checkpoints."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
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

from whiten_index.artifacts.files import writing
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.progress import Stages
from whiten_index.training import checkpoints
from whiten_index.training.contrastive_model import Collator, ContrastiveModel
from whiten_index.training.training_config import BEST, CURVES, Precision, TrainingConfig

_LOG_STEPS = 25

Score = Callable[[ContrastiveModel], Mapping[str, float]]
Curves = list[dict[str, float]]


def run(
    config: TrainingConfig,
    model: ContrastiveModel,
    sentences: Sequence[str],
    collator: Collator,
    *,
    score: Score | None,
    folder: Path,
    identity: str,
    stages: Stages,
) -> tuple[dict[str, Any], Curves]:
    """Train a model in place, from its last checkpoint in ``folder`` if there is one.

    Checkpoints of a training with another ``identity`` are refused.

    Returns the facts for the report, and the curves. The model has the weights of ``best_step``.
    """
    total = config.max_steps or max(round(len(sentences) // config.batch_size * config.epochs), 1)
    # The reports of the libraries are kept off a user's terminal.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    trainer = _Trainer(
        model=model,
        args=_arguments(config, folder, total=total, scored=score is not None),
        train_dataset=sentences,
        # The Trainer wants one; only ``score`` knows the pairs.
        eval_dataset=None if score is None else sentences,
        data_collator=collator,
    )
    trainer.score = score
    last = checkpoints.last_whole(folder, identity)
    resumed = 0 if last is None else checkpoints.step_of(last)
    with stages.stage("train", total) as watcher:
        callback = _Callback(watcher.advance, total=total, score=score, identity=identity)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(callback)
        watcher.advance(resumed)
        if last is not None and resumed >= total:
            # It was stopped between its last step and its end.
            with checkpoints.loaded(last):
                trainer.state = TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))
            checkpoints.load_weights(last / "model.safetensors", model)
        else:
            try:
                trainer.train(resume_from_checkpoint=None if last is None else str(last))
            except torch.OutOfMemoryError as error:
                raise EncoderError(
                    "the GPU's memory is full; take smaller batches, shorter sentences or fewer "
                    "positives"
                ) from error
    if callback.stopped is not None:
        raise callback.stopped
    rows = _curves(trainer.state.log_history)
    best = _best_of(rows)
    if best is not None:
        checkpoints.load_weights(checkpoints.best_weights(folder, int(best["step"])), model)
    _require_finite(model)
    facts = {
        "steps": trainer.state.global_step,
        "best_step": int(best["step"]) if best else trainer.state.global_step,
        BEST: best[BEST] if best else None,
        "stsb_dev_before": next((row[BEST] for row in rows if BEST in row), None),
        "resumed_at": resumed,
    }
    return facts, rows


def _require_finite(model: ContrastiveModel) -> None:
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise _diverged()


def _diverged() -> EncoderError:
    return EncoderError(
        "the training diverged: its numbers are not finite any more, or all embeddings are the "
        "same; take a smaller learning rate, and name another --out or remove the checkpoints"
    )


def _curves(history: Sequence[Mapping[str, float]]) -> Curves:
    """Return the log with one row a step, the scores without their prefix."""
    rows: dict[int, dict[str, float]] = {}
    for entry in history:
        row = rows.setdefault(int(entry["step"]), {})
        row |= {name.removeprefix("eval_"): value for name, value in entry.items()}
    return [
        {name: row[name] for name in CURVES if name in row}
        for _, row in sorted(rows.items())
        if "loss" in row or BEST in row
    ]


def _best_of(rows: Curves) -> Mapping[str, float] | None:
    """Return the first row with the best score; step 0 does not count, since nothing is trained."""
    scored = [row for row in rows if row["step"] and not math.isnan(row.get(BEST, math.nan))]
    return max(scored, key=lambda row: row[BEST], default=None)


def _logged(scores: Mapping[str, float]) -> dict[str, float]:
    return {f"eval_{name}": float(value) for name, value in scores.items()}


class _Trainer(Trainer):  # type: ignore[misc]
    """Evaluates by ``score``, a function of the model."""

    score: Score | None = None
    control: TrainerControl

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with checkpoints.written(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, checkpoint: str, *args: Any) -> None:
        with checkpoints.loaded(checkpoint):
            TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
            super()._load_from_checkpoint(checkpoint, *args)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with checkpoints.loaded(checkpoint or ""):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with checkpoints.loaded(checkpoint or ""):
            super()._load_rng_state(checkpoint)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Log the scores, and save the weights if they are the best."""
        assert self.score is not None
        _require_finite(self.model)
        try:
            scores = _logged(self.score(self.model))
        except ConfigError as error:
            # The same pairs could be ranked before.
            raise _diverged() from error
        self.log(dict(scores))
        best, step = _best_of(_curves(self.state.log_history)), self.state.global_step
        if best is not None and best["step"] == step:
            checkpoints.save_best(Path(self.args.output_dir), step, self.model)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, scores
        )
        return scores


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Reports each step; on Ctrl-C the training stops with a checkpoint."""

    def __init__(
        self, advance: Callable[[int], None], *, total: int, score: Score | None, identity: str
    ) -> None:
        self._advance, self._total, self._score = advance, total, score
        self._identity = identity
        self.stopped: KeyboardInterrupt | None = None

    def on_train_begin(self, args: Any, state: Any, _: Any, **given: Any) -> None:
        """Score the model before training; its weights are no candidate for the best."""
        # A checkpoint has the setting of the command that made it.
        state.save_steps = args.save_steps
        if state.global_step == 0 and self._score is not None:
            scores = _logged(self._score(given["model"]))
            state.log_history.append({"epoch": 0.0, "step": 0, **scores})

    def on_save(self, args: Any, state: Any, _: Any, **__: Any) -> None:
        """Mark the checkpoint as whole, and remove those that it replaces."""
        folder = Path(args.output_dir)
        with writing(folder, kept="earlier checkpoints are kept"):
            best = _best_of(_curves(state.log_history))
            made = folder / f"checkpoint-{state.global_step}"
            checkpoints.keep(folder, made, int(best["step"]) if best else None, self._identity)

    def on_log(self, _: Any, __: Any, ___: Any, **given: Any) -> None:
        """Stop if the loss is not finite any more."""
        loss = (given.get("logs") or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            raise _diverged()

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        """Stop on Ctrl-C; log the loss at each checkpoint and at the end."""
        try:
            self._advance(1)
        except KeyboardInterrupt as error:
            self.stopped = error
            control.should_save = control.should_training_stop = True
        # A checkpoint does not hold the sum of losses since the last log.
        if control.should_save or state.global_step == self._total:
            control.should_log = True


def _arguments(
    config: TrainingConfig, folder: Path, *, total: int, scored: bool
) -> TrainingArguments:
    every = min(config.eval_steps, total)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=config.batch_size,
        max_steps=total,
        learning_rate=config.learning_rate,
        bf16=config.precision is Precision.BF16,
        fp16=config.precision is Precision.FP16,
        use_cpu=config.device == "cpu" or not torch.cuda.is_available(),
        seed=config.seed,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        # The log must show a loss that is NaN.
        logging_nan_inf_filter=False,
        logging_first_step=True,
        logging_steps=min(_LOG_STEPS, every),
        save_steps=config.save_steps,
        eval_strategy="steps" if scored else "no",
        eval_steps=every,
    )
    # Whitening is over a batch, and seeds are for one device: further GPUs are not used.
    _ = arguments.device
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
