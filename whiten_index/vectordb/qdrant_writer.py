"""Writer of collections of Qdrant.

A point's id is a UUID made of its row's key. Its payload is the row as JSON: id and kept columns.
"""

from __future__ import annotations

import os
import re
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.alias_writer import METADATA_KEY, SUFFIX_BYTES, AliasWriter
from whiten_index.vectordb.database_writer import (
    VECTOR,
    Layout,
    Metric,
    Neighbours,
    PushedTable,
    VectorDtype,
    blocks,
    padded_scores,
    vectors_array,
    vectors_of,
)
from whiten_index.vectordb.engine_options import QdrantOptions
from whiten_index.vectordb.engine_support import (
    disk_advice,
    first_line,
    host_and_port,
    reporting,
    reports,
    require_engine_folder,
    require_name,
)
from whiten_index.vectordb.json_rows import from_objects, to_objects

# Namespace of the UUIDs of rows. Never changed: earlier rows are found by it.
_NAMESPACE = uuid.UUID("9d621fcd-1abb-43aa-ac44-d636e07596b2")
_DATATYPES = {VectorDtype.FLOAT32: "float32", VectorDtype.FLOAT16: "float16"}
_DISTANCES = {Metric.COSINE: "Cosine", Metric.INNER_PRODUCT: "Dot"}
# A server takes 32 MB at once by REST; in JSON a number of a vector takes some 21 bytes.
_REQUEST_BYTES, _JSON_NUMBER = 1 << 20, 21
_IDS_AT_ONCE, _QUERIES_AT_ONCE = 500, 64
# Seconds between two looks at the state of an index.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


# Collections keep metadata, in which a push writes what they hold, from this release on.
_LEAST_RELEASE = (1, 16)
_PORT = 6333
_FORMS = f"qdrant://host:{_PORT}, qdrant+https://host:{_PORT} and qdrant:///folder"


@dataclass(frozen=True)
class QdrantAddress:
    """A server or a folder."""

    shown: str
    url: str = ""
    folder: Path | None = None

    @classmethod
    def parse(cls, address: str) -> QdrantAddress:
        """Return what an address names."""
        parts = urlsplit(address)
        https, path = parts.scheme == "qdrant+https", unquote(parts.path).rstrip("/")
        if not parts.netloc and path and not https:
            return cls(f"qdrant://{path}", folder=Path(path))
        place = host_and_port(address, _PORT, f"the address of Qdrant is one of {_FORMS}") + path
        return cls(f"{parts.scheme}://{place}", f"http{'s' if https else ''}://{place}")

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return the reason of an error of the client, and what to do."""
        # REST and gRPC have their own errors, and wrap those of their transports.
        cause = getattr(error, "source", error)
        status, code = getattr(error, "status_code", None), getattr(error, "code", None)
        why: object = cause
        if status is not None:
            why = f"{status}: {_answer(error)}"
        elif callable(code):
            status = code().name
            why = f"{status}: {getattr(error, 'details', str)()}"
        elif type(cause).__module__.startswith(("httpx", "httpcore")):
            status = "UNAVAILABLE"
        reason = first_line(why)
        return reason, self._advice(status, reason)

    def _advice(self, status: Any, reason: str) -> str:
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return "name a file of the certificates to trust with --option tls_ca=FILE"
        if status in (401, 403, "UNAUTHENTICATED", "PERMISSION_DENIED"):
            return "give a key that may write in QDRANT_API_KEY"
        if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", 502, 503, 504):
            return (
                "check that a Qdrant server answers there, or give it more seconds with "
                "--option timeout=N; push again to resume"
            )
        if "already accessed" in reason:
            return "another connection has this folder, and it takes one at a time; close that one"
        if self.folder is not None:
            return disk_advice(reason) or "push again when that is mended"
        return "see the log of the server, and push again"


class QdrantWriter(AliasWriter):
    """One alias of Qdrant; see ``DatabaseWriter``."""

    def __init__(
        self, address: str, name: str, options: Mapping[str, str], *, make: bool = True
    ) -> None:
        super().__init__(name)
        self._options, place = QdrantOptions.parse(options), QdrantAddress.parse(address)
        # A collection is a folder of the server.
        longest = 255 - SUFFIX_BYTES
        require_name(
            name, r'(?!\.{1,2}$)[^<>:"/\\|?*\x00-\x1f\x7f]+', engine="Qdrant", longest=longest,
            rule='no control characters and none of < > : " / \\ | ? *',
        )  # fmt: skip
        self._client, self.engine = open_client(place, self._options, make=make)
        self._local, self._place = place.folder is not None, place
        self.target = f"{place.shown}, collection {name}"

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return the reason of an error of the client, and what to do."""
        return self._place.explain(error)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @reports("collections could not be listed")
    def _collections(self) -> Sequence[str]:
        return [each.name for each in self._client.get_collections().collections]

    @reports("aliases could not be listed")
    def _alias_target(self) -> str | None:
        found = self._client.get_aliases().aliases
        return next((e.collection_name for e in found if e.alias_name == self._name), None)

    @reports("its metadata could not be read")
    def _metadata(self, collection: str) -> Mapping[str, Any]:
        metadata = self._client.get_collection(collection).config.metadata or {}
        found = metadata.get(METADATA_KEY)
        return found if isinstance(found, Mapping) else {}

    @reports("its metadata could not be written")
    def _write_metadata(self, collection: str, metadata: Mapping[str, Any]) -> None:
        self._client.update_collection(collection, metadata={METADATA_KEY: dict(metadata)})

    @reports("the collection could not be made")
    def _create(self, collection: str, layout: Layout, metadata: Mapping[str, Any]) -> None:
        chosen = self._options
        self._client.create_collection(
            collection,
            vectors_config=models.VectorParams(
                size=layout.k,
                distance=models.Distance(_DISTANCES[layout.metric]),
                datatype=models.Datatype(_DATATYPES[layout.dtype]),
                on_disk=chosen.on_disk,
            ),
            hnsw_config=models.HnswConfigDiff(m=chosen.m, ef_construct=chosen.ef_construct),
            # No graph is built before all rows are loaded.
            optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
            shard_number=chosen.shard_number,
            replication_factor=chosen.replication_factor,
            metadata={METADATA_KEY: dict(metadata)},
        )
        if PASSAGE in layout.key and not self._local:
            # Passages are found by the id of their document.
            kind = "integer" if pa.types.is_integer(layout.schema.field(ID).type) else "keyword"
            self._client.create_payload_index(
                collection, ID, field_schema=models.PayloadSchemaType(kind), wait=True
            )

    @reports("the old collection could not be dropped")
    def _drop(self, collection: str) -> None:
        self._client.delete_collection(collection)

    @reports("the new collection could not be swapped in")
    def _point_alias(self, collection: str, *, replaces: bool) -> None:
        gone = models.DeleteAlias(alias_name=self._name)
        made = models.CreateAlias(collection_name=collection, alias_name=self._name)
        steps: list[Any] = [models.DeleteAliasOperation(delete_alias=gone)] if replaces else []
        steps.append(models.CreateAliasOperation(create_alias=made))
        self._client.update_collection_aliases(change_aliases_operations=steps)

    @reports("rows could not be added")
    def _upsert(self, collection: str, rows: pa.RecordBatch, layout: Layout) -> None:
        if not len(rows):
            return
        vectors = vectors_of(rows)
        number = 4 if self._options.prefer_grpc else _JSON_NUMBER
        size = number * layout.k + (rows.nbytes - vectors.nbytes) // len(rows)
        # This call alone takes an array of numbers as it is.
        self._client.upload_collection(
            collection,
            vectors=vectors,
            payload=to_objects(rows, (ID, *layout.kept)),
            ids=_point_ids(rows, layout),
            batch_size=max(1, _REQUEST_BYTES // size),
            wait=True,
        )

    @reports("rows could not be deleted")
    def _delete(self, collection: str, ids: Sequence[str | int], layout: Layout) -> None:
        for some in blocks(ids, _IDS_AT_ONCE):
            if PASSAGE in layout.key:
                selector: Any = models.FilterSelector(filter=_of_documents(some))
            else:
                selector = models.PointIdsList(points=[row_uuid(each) for each in some])
            self._client.delete(collection, selector, wait=True)

    @reports("the index could not be built")
    def _build(self, pushed: PushedTable, layout: Layout) -> None:  # noqa: ARG002
        if self._local:
            return
        chosen = self._options
        quantised = _quantization(chosen.quantization)
        self._client.update_collection(
            pushed.name,
            optimizers_config=models.OptimizersConfigDiff(
                indexing_threshold=chosen.indexing_threshold
            ),
            **({} if quantised is None else {"quantization_config": quantised}),
        )
        self._wait(pushed.name)

    def _wait(self, collection: str) -> None:
        end, pause, greens = time.monotonic() + self._options.index_timeout, _FIRST_PAUSE, 0
        nudged = False
        # Work may begin after the first look, so green is believed the second time.
        while greens < 2:
            info = self._client.get_collection(collection)
            wrong = getattr(info.optimizer_status, "error", None)
            if info.status == models.CollectionStatus.RED or wrong:
                raise DatabaseError(
                    f"{self.target}: the index failed ({wrong or 'status red'}); see the log of "
                    "the server"
                )
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

    @reports("rows could not be counted")
    def _count(self, collection: str) -> int:
        return int(self._client.count(collection, exact=True).count)

    @reports("rows could not be read")
    def _fetch(self, collection: str, ids: Sequence[str | int], layout: Layout) -> pa.Table:
        records = list[Any]()
        for some in blocks(ids, _IDS_AT_ONCE):
            if PASSAGE in layout.key:
                records += self._scroll(collection, _of_documents(some))
            else:
                points = [row_uuid(each) for each in some]
                records += self._client.retrieve(collection, points, with_vectors=True)
        at = layout.schema.get_field_index(VECTOR)
        rows = from_objects([each.payload for each in records], layout.schema.remove(at))
        vectors = np.array([each.vector for each in records], dtype=np.float32)
        return rows.add_column(at, layout.schema.field(at), vectors_array(vectors, layout.k))

    def _scroll(self, collection: str, condition: models.Filter) -> Iterator[Any]:
        page: Any = None
        while True:
            points, page = self._client.scroll(
                collection, condition, limit=_IDS_AT_ONCE, offset=page, with_vectors=True
            )
            yield from points
            if page is None:
                return

    @reports("it could not be searched")
    def _search(
        self, collection: str, vectors: NDArray[np.float32], top_k: int, *, exact: bool
    ) -> Neighbours:
        # Local mode is always exact, and warns of parameters.
        params = None if self._local else self._search_params(exact=exact)
        queries = [
            models.QueryRequest(query=each, limit=top_k, params=params, with_payload=[ID])
            for each in vectors.tolist()
        ]
        answers = list[Any]()
        for some in blocks(queries, _QUERIES_AT_ONCE):
            answers += self._client.query_batch_points(collection, some)
        scores = padded_scores([[each.score for each in one.points] for one in answers], top_k)
        return Neighbours(
            [[point.payload[ID] for point in each.points] for each in answers], scores
        )

    def _search_params(self, *, exact: bool) -> models.SearchParams:
        if exact:
            ignored = models.QuantizationSearchParams(ignore=True)
            return models.SearchParams(exact=True, quantization=ignored)
        ranked_again = models.QuantizationSearchParams(
            rescore=True, oversampling=self._options.oversampling
        )
        quantised = self._options.quantization != "none"
        return models.SearchParams(
            hnsw_ef=self._options.hnsw_ef, quantization=ranked_again if quantised else None
        )


def row_uuid(name: str | int, passage: int | None = None) -> str:
    """Return the UUID of a row, the same on every machine (version 5, RFC 9562).

    It is made of ``s:`` and the id if that is text, of ``i:`` and its digits if it is a number. The
    number of a passage stands before the colon.
    """
    kind = "s" if isinstance(name, str) else "i"
    return str(uuid.uuid5(_NAMESPACE, f"{kind}{'' if passage is None else passage}:{name}"))


def _point_ids(rows: pa.RecordBatch, layout: Layout) -> list[str]:
    columns = (rows[name].to_pylist() for name in layout.key)
    return [row_uuid(*key) for key in zip(*columns, strict=True)]


def _of_documents(ids: Sequence[str | int]) -> models.Filter:
    match = models.MatchAny(any=list(ids))
    return models.Filter(must=[models.FieldCondition(key=ID, match=match)])


def _quantization(kind: str) -> Any:
    if kind == "none":
        return None
    if kind == "binary":
        return models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True))
    scalar = models.ScalarQuantizationConfig(
        type=models.ScalarType.INT8, quantile=0.99, always_ram=True
    )
    return models.ScalarQuantization(scalar=scalar)


def open_client(
    address: QdrantAddress, options: QdrantOptions, *, make: bool
) -> tuple[QdrantClient, str]:
    """Return a connected client, and the name and release of the engine."""
    if address.folder is not None:
        return _open_folder(address, address.folder, options, make=make)
    with reporting(address.shown, "it could not be reached", address.explain):
        client = QdrantClient(
            url=address.url, api_key=os.environ.get("QDRANT_API_KEY") or None,
            timeout=options.timeout, prefer_grpc=options.prefer_grpc,
            grpc_port=options.grpc_port, check_compatibility=False,
            **_trusting(address, options.tls_ca),
        )  # fmt: skip
        release = str(client.info().version)
    numbers = re.match(r"v?(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < _LEAST_RELEASE:
        raise DatabaseError(
            f"{address.shown} is Qdrant {release}, whose collections keep no metadata; a push "
            f"needs {'.'.join(map(str, _LEAST_RELEASE))} or later"
        )
    return client, f"Qdrant {release}"


def _open_folder(
    address: QdrantAddress, folder: Path, options: QdrantOptions, *, make: bool
) -> tuple[QdrantClient, str]:
    if options.model_fields_set:
        raise ConfigError(
            f"{address.shown} is Qdrant's local mode, which searches exactly and has no options; "
            f"leave out --option {min(options.model_fields_set)}"
        )
    marks = ("meta.json", "collection")
    require_engine_folder(folder, engine="Qdrant", marks=marks, address=address.shown, make=make)
    with reporting(address.shown, "it could not be opened", address.explain):
        client = QdrantClient(path=str(folder))
        return client, f"Qdrant's local mode {client.info().version}, which searches exactly"


def _trusting(address: QdrantAddress, path: str | None) -> dict[str, Any]:
    """Return the arguments by which a client trusts the certificates in a file."""
    if path is None:
        return {}
    if not address.url.startswith("https:"):
        raise ConfigError("--option tls_ca is for an address that begins with qdrant+https://")
    try:
        context, certificates = ssl.create_default_context(cafile=path), Path(path).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--option tls_ca: {path} holds no certificates that can be read ({error})"
        ) from error
    return {"verify": context, "grpc_options": {"root_certificates": certificates}}


def _answer(error: Any) -> str:
    """Return the answer of a server by REST."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, LookupError, TypeError):
        return str(error.reason_phrase or "no reason given")
