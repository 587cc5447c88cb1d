"""The candidate: a version that is made, looked at by gates, and published or kept aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.changes import Changes
from whiten_index.encode import EncodeReport
from whiten_index.gates import Base as GateBase
from whiten_index.gates import CanaryFile, Gate, require_passed, run_gates
from whiten_index.progress import Stages
from whiten_index.publish import write_version
from whiten_index.shard_workers import EncoderSource
from whiten_index.update.base import Base
from whiten_index.update.config import UpdateConfig
from whiten_index.update.decide import Decided


class Examination:
    """The gates of one update, and what they found."""

    def __init__(
        self,
        config: UpdateConfig,
        base: Base,
        encoded: EncodeReport,
        changes: Changes,
        canaries: CanaryFile | None,
        stages: Stages,
    ) -> None:
        self.config, self.base, self.encoded = config, base, encoded
        self.changes, self.canaries, self.stages = changes, canaries, stages
        self.gates: tuple[Gate, ...] = ()

    def __call__(self, folder: Path, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Look at a version's files before its manifest is sealed."""
        counts = self.changes.to_json()
        # With passages it is documents that are counted, and rows that the index has.
        known = not self.base.passages
        rows = GateBase(
            self.base.record.rows,
            new=counts["new"] if known else None,
            deleted=counts["deleted"] if known else None,
        )
        self.gates = run_gates(
            faiss_index.open_unsealed(folder, fields),
            self.encoded.store,
            self.encoded.record,
            config=self.config.gates(),
            stages=self.stages,
            base=rows,
            canaries=self.canaries,
            encode=self._encode,
            seed=self.base.config.seed,
        )
        return [gate.to_json() for gate in self.gates]

    @property
    def _encode(self) -> Callable[[Any], NDArray[np.floating]] | None:
        if self.canaries is None or not self.canaries.needs_encoder:
            return None
        return EncoderSource(self.base.config.encoder_config())().encode_queries


def make_candidate(
    version: str,
    encoded: EncodeReport,
    decided: Decided,
    facts: Mapping[str, Any],
    examine: Examination,
) -> None:
    """Write the candidate, and refuse to go on where a gate does.

    Raises:
        GateError: a gate did not pass; the candidate is kept.
    """
    config = examine.base.config

    def finish(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        whitening = facts["decision"]["whitening"]
        examine.changes.save(
            folder / faiss_index.CHANGES, base=examine.base.version, whitening=whitening
        )
        return {"update": dict(facts), "gates": examine(folder, fields)}

    write_version(
        config,
        encoded,
        decided.settled,
        version,
        examine.stages,
        faiss_index.publish_candidate,
        finish=finish,
    )
    out = Path(str(config.out))
    require_passed(examine.gates, candidate=out / faiss_index.CANDIDATES / version)
