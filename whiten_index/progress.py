"""Progress events of a long job: stages that start, advance by rows, and finish."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


class Progress:
    """A watcher of stages that shows nothing; a terminal's bars and log lines are made from it."""

    def start(self, stage: str, total: int) -> None:
        """Hear that ``stage`` begins and will handle ``total`` rows."""

    def advance(self, rows: int) -> None:
        """Hear that ``rows`` more rows of the current stage are done."""

    def finish(self, stage: str, seconds: float) -> None:
        """Hear that ``stage`` ended after ``seconds`` of wall time."""

    def note(self, message: str) -> None:
        """Hear one sentence a user should see."""


@dataclass
class Stages:
    """Times the stages of a job and reports them to a watcher."""

    watcher: Progress
    # Stage -> wall seconds, stages in the order they ran.
    seconds: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # stage -> rows handled

    @contextmanager
    def stage(self, name: str, total: int, *, part: str = "") -> Iterator[Progress]:
        """Time the block as stage ``name`` over ``total`` rows; ``part`` is added to its name."""
        self.watcher.start(f"{name} {part}".rstrip(), total)
        started = time.perf_counter()
        try:
            yield self.watcher
        except (OSError, MemoryError, RuntimeError) as error:
            # A disk that fails or memory that ends names no file; see ``unforeseen``.
            error.add_note(name)
            raise
        finally:
            elapsed = time.perf_counter() - started
            self.add({name: elapsed}, {name: total})
            self.watcher.finish(name, elapsed)

    @contextmanager
    def whole(self, name: str, total: int) -> Iterator[None]:
        """Time the block as a stage whose rows are done at its end, all at once."""
        with self.stage(name, total) as watcher:
            yield
            watcher.advance(total)

    def add(self, seconds: Mapping[str, float], rows: Mapping[str, int]) -> None:
        """Count in stages that were timed elsewhere."""
        for name, more in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + more
            self.rows[name] = self.rows.get(name, 0) + rows.get(name, 0)
