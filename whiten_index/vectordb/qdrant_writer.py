"""Writer of collections of Qdrant.

A point's id is a UUID made of its row's key. Its payload is the row as JSON: id and kept columns.
The points of a folder are pickles; of these, only those of points are read.
"""

import io
import os
import pickle
import re
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter
from qdrant_client import QdrantClient, models
from qdrant_client.local import persistence

from whiten_index.artifacts.files import exists, list_folder, reading, size_of
from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import ConfigError, DatabaseError, first_line
from whiten_index.vectordb.alias_writer import AliasWriter
from whiten_index.vectordb.database_writer import Find, Hit, Stored
from whiten_index.vectordb.engine_options import Effort, QdrantOptions
from whiten_index.vectordb.engine_support import EngineAddress, advice, require_engine_folder
from whiten_index.vectordb.json_rows import table_of, to_objects
from whiten_index.vectordb.pushed_table import METADATA, Ids, Layout, vectors_of

# Namespace of the UUIDs of rows. Never changed: earlier rows are found by it.
_NAMESPACE = uuid.UUID("9d621fcd-1abb-43aa-ac44-d636e07596b2")
_DISTANCES = {"cosine": "Cosine", "ip": "Dot"}
# A server takes 32 MB at once by REST; in JSON a number of a vector takes some 21 bytes.
_REQUEST_BYTES, _JSON_NUMBER = 1 << 20, 21
# Seconds between two looks at the state of an index.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
# Collections keep metadata, in which a push writes what they hold, from this release on.
_LEAST_RELEASE = (1, 16)
_KEY = "QDRANT_API_KEY"
# What the client writes first into a new folder.
_FIRST = b'{"collections": {}, "aliases": {}}'
_POINT_MODULES = {models.PointStruct.__module__, "datetime"}


class _PointReader(pickle.Unpickler):
    """Reads a point of a folder, and refuses a pickle that would make or call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that the client's models or ``datetime`` define."""
        found = vars(sys.modules[module]).get(name) if module in _POINT_MODULES else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(
                f"a point holds {module}.{name}, which no client of Qdrant writes; open only "
                "folders that you trust, or remove this one and push again"
            )
        return found


# The client reads pickles of folders by this name.
persistence.pickle = SimpleNamespace(
    dumps=pickle.dumps, loads=lambda data: _PointReader(io.BytesIO(data)).load()
)


class QdrantWriter(AliasWriter):
    """One alias of Qdrant; see ``DatabaseWriter``."""

    def __init__(self, address: str, name: str, options: QdrantOptions, *, make: bool) -> None:
        super().__init__(name)
        self._options = options
        place = EngineAddress.parse(address, QdrantOptions)
        self._local = place.folder is not None
        self._collections_folder = place.folder and place.folder / "collection"
        self.exact_only = self._local
        self.target = f"{place.shown}, collection {name}"
        given = self._connection(place, make=make)
        with self._reporting("it could not be reached"):
            if make and place.folder and list_folder(place.folder) == [place.folder / "meta.json"]:
                # The client was cut off before it made its lock; a part of the file stops it.
                with reading(meta := place.folder / "meta.json"):
                    begun = size_of(meta) <= len(_FIRST) and _FIRST.startswith(meta.read_bytes())
                if not begun:
                    raise ConfigError(
                        f"{place.shown} has a meta.json that Qdrant did not begin; name a folder "
                        "that is empty or not there yet"
                    )
                meta.unlink()
            self._client = QdrantClient(**given)
            release = str(self._client.info().version)
        mode = "Qdrant's local mode {}, which searches exactly" if self._local else "Qdrant {}"
        self.engine = mode.format(release)
        numbers = re.match(r"v?(\d+)\.(\d+)", release)
        if not self._local and numbers and (int(numbers[1]), int(numbers[2])) < _LEAST_RELEASE:
            raise DatabaseError(
                f"{place.shown} is Qdrant {release}, whose collections keep no metadata; a push "
                f"needs {'.'.join(map(str, _LEAST_RELEASE))} or later"
            )

    def _connection(self, place: EngineAddress, *, make: bool) -> dict[str, Any]:
        options = self._options
        if place.folder is None:
            return {
                "url": "/".join(filter(None, (place.url, place.inside))),
                "api_key": os.environ.get(_KEY) or None,
                "timeout": options.timeout,
                "prefer_grpc": options.prefer_grpc,
                "grpc_port": options.grpc_port,
                "check_compatibility": False,
            }
        if options.model_fields_set:
            raise ConfigError(
                f"{place.shown} is Qdrant's local mode, which searches exactly and has no "
                f"options; leave out --option {min(options.model_fields_set)}"
            )
        marks = ("meta.json",)
        if exists(place.folder / "collection") and not exists(place.folder / marks[0]):
            # Their folders would be taken for remains.
            raise ConfigError(
                f"{place.shown} has collections and no meta.json, which lists them; restore that "
                "file, or name another folder"
            )
        require_engine_folder(
            place.folder, engine="Qdrant", marks=marks, address=place.shown, make=make
        )
        return {"path": str(place.folder)}

    def _explain(self, error: Exception) -> tuple[str, str]:
        # REST and gRPC have their own errors, and wrap those of their transports.
        cause: object = getattr(error, "source", error)
        status, code = getattr(error, "status_code", None), getattr(error, "code", None)
        if status is not None:
            cause = f"{status}: {_answer(error)}"
        elif callable(code):
            cause = f"{code().name}: {getattr(error, 'details', str)()}"
        elif type(cause).__module__.startswith(("httpx", "httpcore")):
            cause = f"unavailable: {cause}"
        reason = first_line(cause)
        return reason, advice(reason, credentials="" if self._local else _KEY)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _collections(self) -> Sequence[str]:
        return [each.name for each in self._client.get_collections().collections]

    def _alias_target(self) -> str | None:
        found = self._client.get_aliases().aliases
        return next((e.collection_name for e in found if e.alias_name == self._name), None)

    def _aliases_of(self, collection: str) -> Sequence[str]:
        found = self._client.get_aliases().aliases
        return [each.alias_name for each in found if each.collection_name == collection]

    def _metadata(self, collection: str) -> Any:
        return (self._client.get_collection(collection).config.metadata or {}).get(METADATA)

    def _describe(self, stored: Stored) -> None:
        self._client.update_collection(stored.name, metadata={METADATA: stored.table.text})

    def _make(self, collection: str, layout: Layout, description: str) -> None:
        chosen = self._options
        self._client.create_collection(
            collection,
            vectors_config=models.VectorParams(
                size=layout.k,
                distance=models.Distance(_DISTANCES[layout.metric]),
                datatype=models.Datatype(layout.dtype),
                on_disk=chosen.on_disk,
            ),
            hnsw_config=models.HnswConfigDiff(m=chosen.m, ef_construct=chosen.ef_construct),
            # No graph is built before all rows are loaded.
            optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
            shard_number=chosen.shard_number,
            replication_factor=chosen.replication_factor,
            metadata={METADATA: description},
        )
        if PASSAGE in layout.key and not self._local:
            # Passages are found by the id of their document.
            kind = "integer" if pa.types.is_integer(layout.schema.field(ID).type) else "keyword"
            self._client.create_payload_index(
                collection, ID, field_schema=models.PayloadSchemaType(kind), wait=True
            )

    def _drop(self, collection: str) -> None:
        self._client.delete_collection(collection)

    def _point_alias(self, collection: str | None, *, replaces: bool) -> None:
        gone = models.DeleteAlias(alias_name=self._name)
        steps: list[Any] = [models.DeleteAliasOperation(delete_alias=gone)] if replaces else []
        if collection is not None:
            made = models.CreateAlias(collection_name=collection, alias_name=self._name)
            steps.append(models.CreateAliasOperation(create_alias=made))
        self._client.update_collection_aliases(change_aliases_operations=steps)

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        if not len(rows):
            return
        vectors = vectors_of(rows)
        number = 4 if self._options.prefer_grpc else _JSON_NUMBER
        size = number * layout.k + (rows.nbytes - vectors.nbytes) // len(rows)
        keys = [rows[name].to_pylist() for name in layout.key]
        # This call alone takes an array of numbers as it is.
        self._client.upload_collection(
            stored.name,
            vectors=vectors,
            payload=to_objects(rows, (ID, *layout.kept)),
            ids=[row_uuid(*key) for key in zip(*keys, strict=True)],
            batch_size=max(1, _REQUEST_BYTES // size),
            wait=True,
        )

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:
        if PASSAGE in layout.key:
            selector: Any = models.FilterSelector(filter=_of_documents(ids))
        else:
            selector = models.PointIdsList(points=[row_uuid(each) for each in ids])
        self._client.delete(stored.name, selector, wait=True)

    def _build(self, held: Stored, layout: Layout) -> None:  # noqa: ARG002
        if self._local:
            return
        chosen = self._options
        self._client.update_collection(
            held.name,
            optimizers_config=models.OptimizersConfigDiff(
                indexing_threshold=chosen.indexing_threshold
            ),
            quantization_config=_quantization(chosen.quantization),
        )
        self._wait(held.name)

    def _wait(self, collection: str) -> None:
        end, pause, greens = time.monotonic() + self._options.index_timeout, _FIRST_PAUSE, 0
        nudged = False
        # Work may begin after the first look, so green is believed the second time.
        while greens < 2:
            info = self._client.get_collection(collection)
            wrong = getattr(info.optimizer_status, "error", None)
            if info.status == models.CollectionStatus.RED or wrong:
                raise DatabaseError(f"{self.target}: the index failed ({wrong}); see its log")
            if info.status == models.CollectionStatus.GREY and not nudged:
                # The server waits for a change before it starts.
                nudged = True
                self._client.update_collection(
                    collection, optimizers_config=models.OptimizersConfigDiff()
                )
            greens = greens + 1 if info.status == models.CollectionStatus.GREEN else 0
            if time.monotonic() > end:
                raise DatabaseError(
                    f"{self.target}: the index was not built after {self._options.index_timeout} "
                    "seconds, and the server continues; push again later, or with --option "
                    "index_timeout=N"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _count(self, stored: Stored) -> int:
        return int(self._client.count(stored.name, exact=True).count)

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        if PASSAGE in layout.key:
            records = list(self._scroll(stored, _of_documents(ids)))
        else:
            points = [row_uuid(each) for each in ids]
            records = self._client.retrieve(stored.name, points, with_vectors=True)
        vectors = np.array([each.vector for each in records], dtype=np.float32)
        return table_of([each.payload for each in records], vectors, layout)

    def _scroll(self, stored: Stored, condition: models.Filter) -> Iterator[Any]:
        page = None
        while True:
            points, page = self._client.scroll(
                stored.name, condition, limit=self.ids_at_once, offset=page, with_vectors=True
            )
            yield from points
            if page is None:
                return

    @contextmanager
    def _searching(self, stored: Stored, *, exact: bool, effort: Effort | None) -> Iterator[Find]:
        again = models.QuantizationSearchParams(ignore=exact, rescore=True, oversampling=2.0)
        usual = self._options.usual_effort(stored.table.rows)
        settings = {} if exact else usual if effort is None else effort
        params = models.SearchParams(exact=exact, quantization=again, **settings)

        def find(vectors: NDArray[np.float32], top_k: int) -> list[list[Hit]]:
            queries = [
                # Local mode is always exact, and warns of parameters.
                models.QueryRequest(
                    query=each,
                    limit=top_k,
                    params=None if self._local else params,
                    with_payload=[ID],
                )
                for each in vectors.tolist()
            ]
            answers = self._client.query_batch_points(stored.name, queries)
            return [[Hit(hit.payload[ID], hit.score) for hit in one.points] for one in answers]

        yield find


def _quantization(name: str) -> Any:
    """Return the configuration of a quantization, such as ``turbo_1.5_bits``; None for none."""
    kind, _, form = name.partition("_")
    if kind == "none":
        return None
    bits = form.removesuffix("_bits").removesuffix("_bit")
    encoding = {"1.5": "one_and_half_bits", "2": "two_bits"}.get(bits, "one_bit")
    forms: dict[str, dict[str, Any]] = {
        "scalar": {"type": "int8", "quantile": 0.99},
        "product": {"compression": form},
        "turbo": {"bits": "bits" + bits.replace(".", "_")},
        "binary": {"encoding": encoding},
    }
    given = {kind: {**forms[kind], "always_ram": True}}
    return TypeAdapter[Any](models.QuantizationConfig).validate_python(given)


def row_uuid(name: str | int, passage: int | None = None) -> str:
    """Return the UUID of a row, the same on every machine (version 5, RFC 9562).

    It is made of ``s:`` and the id if that is text, of ``i:`` and its digits if it is a number. The
    number of a passage stands before the colon.
    """
    kind = "s" if isinstance(name, str) else "i"
    return str(uuid.uuid5(_NAMESPACE, f"{kind}{'' if passage is None else passage}:{name}"))


def _of_documents(ids: Ids) -> models.Filter:
    match = models.MatchAny(any=list(ids))
    return models.Filter(must=[models.FieldCondition(key=ID, match=match)])


def _answer(error: Any) -> str:
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, LookupError, TypeError):
        return str(error.reason_phrase or "no reason given")
