"""A collection of Qdrant from its making to its graph, which is built after the load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from qdrant_client import models

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import Layout, Metric, VectorDtype
from whiten_index.vectordb.qdrant.collections import metadata_of
from whiten_index.vectordb.qdrant.connection import Place, Told
from whiten_index.vectordb.qdrant.options import Options, Quantization

_DATATYPES = {VectorDtype.FLOAT32: "float32", VectorDtype.FLOAT16: "float16"}
_DISTANCES = {Metric.COSINE: "Cosine", Metric.INNER_PRODUCT: "Dot"}
# A request may not begin the work that it asks for at once: green is believed the second time.
_GREENS, _FIRST_PAUSE, _LONGEST_PAUSE = 2, 0.25, 5.0


@dataclass(frozen=True)
class Building:
    """What makes a collection by options."""

    client: Any
    place: Place
    options: Options

    def create(self, collection: str, layout: Layout, mark: Mapping[str, Any]) -> None:
        """Make an empty collection, which builds no graph and no quantised vectors yet."""
        chosen = self.options
        with Told(self.place)(f"{collection} could not be made"):
            self.client.create_collection(
                collection,
                vectors_config=models.VectorParams(
                    size=layout.k,
                    distance=models.Distance(_DISTANCES[layout.metric]),
                    datatype=models.Datatype(_DATATYPES[layout.dtype]),
                    on_disk=chosen.on_disk,
                ),
                hnsw_config=models.HnswConfigDiff(m=chosen.m, ef_construct=chosen.ef_construct),
                optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
                shard_number=chosen.shard_number,
                replication_factor=chosen.replication_factor,
                metadata=metadata_of(mark),
            )
            if PASSAGE in layout.key and not self.place.local:
                # Passages are found by the id of their document.
                text = not pa.types.is_integer(layout.schema.field(ID).type)
                kind = models.PayloadSchemaType("keyword" if text else "integer")
                self.client.create_payload_index(collection, ID, field_schema=kind, wait=True)

    def index(self, collection: str) -> None:
        """Let a collection build its graph by the options, and wait until it is whole.

        Those of the collection are sent too: a push that goes on may have others than the one that
        made it.

        Raises:
            DatabaseError: it takes longer than ``index_timeout``, or fails.
        """
        chosen, more = self.options, dict[str, Any]()
        if chosen.m is not None or chosen.ef_construct is not None:
            more["hnsw_config"] = models.HnswConfigDiff(
                m=chosen.m, ef_construct=chosen.ef_construct
            )
        if chosen.on_disk is not None:
            more["vectors_config"] = {"": models.VectorParamsDiff(on_disk=chosen.on_disk)}
        if "quantization" in chosen.built:
            more["quantization_config"] = _quantized(chosen.quantization)
        with Told(self.place)("the index could not be begun"):
            self.client.update_collection(
                collection,
                optimizers_config=models.OptimizersConfigDiff(
                    indexing_threshold=chosen.indexing_threshold
                ),
                **more,
            )
        self._wait(collection)

    def _wait(self, collection: str) -> None:
        """Wait until a collection has built all that it is to build.

        Raises:
            DatabaseError: it failed, or takes longer than ``index_timeout``.
        """
        limit = self.options.index_timeout
        end, pause, greens, nudged = time.monotonic() + limit, _FIRST_PAUSE, 0, False
        while True:
            with Told(self.place)("the state of the index could not be read"):
                told = self.client.get_collection(collection)
                status = str(told.status.value)
                if status == "grey" and not nudged:
                    # It knows what to do and waits for a change to begin with it.
                    nudged = True
                    self.client.update_collection(
                        collection, optimizers_config=models.OptimizersConfigDiff()
                    )
            wrong = getattr(told.optimizer_status, "error", None)
            if status == "red" or wrong:
                raise DatabaseError(
                    f"{self.place.shown}: the index of {collection} failed "
                    f"({wrong or 'status red'}); see the log of the server"
                )
            greens = greens + 1 if status == "green" else 0
            if greens == _GREENS:
                return
            if time.monotonic() > end:
                raise DatabaseError(
                    f"{self.place.shown}: the index of {collection} was not built after {limit} "
                    "seconds, and goes on; push again later, or with --option index_timeout=N"
                )
            time.sleep(min(pause, limit))
            pause = min(pause * 1.5, _LONGEST_PAUSE) if status != "green" else pause


def _quantized(kind: Quantization) -> Any:
    """Return how a collection is told to quantise its vectors."""
    if kind is Quantization.NONE:
        return models.Disabled("Disabled")
    if kind is Quantization.BINARY:
        return models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True))
    scalar = models.ScalarQuantizationConfig(
        type=models.ScalarType.INT8, quantile=0.99, always_ram=True
    )
    return models.ScalarQuantization(scalar=scalar)
