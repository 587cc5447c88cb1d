"""A stand-in for a Qdrant server: its REST and gRPC faces over the client's own engine.

What it cannot stand in for is a server's graph, its quantisation and its speed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import grpc
from qdrant_client import QdrantClient, models
from qdrant_client import grpc as messages
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc, payload_to_grpc
from qdrant_client.grpc import (
    collections_service_pb2_grpc,
    points_service_pb2_grpc,
    qdrant_pb2_grpc,
)


class StandIn:
    """Collections in memory, as long as it lives, and what it was asked.

    Attributes:
        calls: name of each call that changes something or searches, and what was sent, in order.
        headers: of the latest request.
        statuses: that ``get_collection`` tells next, one a call; green where there is none left.
        failing: status and message that changes of points are answered with, None for none.
    """

    def __init__(self, release: str = "1.20.0") -> None:
        self.client, self.release = QdrantClient(":memory:"), release
        self.calls: list[tuple[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.statuses: list[str] = []
        self.failing: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._rest: ThreadingHTTPServer | None = None
        self._grpc: Any = None
        self.port = self.grpc_port = 0

    def start(self) -> StandIn:
        face = type("_BoundRest", (_Rest,), {"stand_in": self})
        self._rest = ThreadingHTTPServer(("127.0.0.1", self.port), face)
        self.port = self._rest.server_port
        threading.Thread(target=self._rest.serve_forever, args=(0.02,), daemon=True).start()
        self._grpc = grpc.server(futures.ThreadPoolExecutor(4))
        collections_service_pb2_grpc.add_CollectionsServicer_to_server(
            _Collections(self), self._grpc
        )
        points_service_pb2_grpc.add_PointsServicer_to_server(_Points(self), self._grpc)
        qdrant_pb2_grpc.add_QdrantServicer_to_server(_Root(self), self._grpc)
        self.grpc_port = self._grpc.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        self._grpc.start()
        return self

    def stop(self) -> None:
        if self._rest is not None:
            self._rest.shutdown()
            self._rest.server_close()
            self._rest = None
        if self._grpc is not None:
            self._grpc.stop(0)
            self._grpc = None

    def named(self, name: str) -> list[Any]:
        """What was sent with the calls of a name."""
        return [sent for called, sent in self.calls if called == name]

    def call(self, name: str, *args: Any, **more: Any) -> Any:
        with self._lock:
            if name not in ("get_collection", "get_collections", "get_aliases", "count"):
                self.calls.append((name, (args, dict(more))))
            if self.failing is not None and name in ("upsert", "delete"):
                raise _RefusedError(*self.failing)
            # Local mode warns of what it passes over.
            if name == "query_batch_points":
                more["requests"] = [
                    each.model_copy(update={"params": None}) for each in more["requests"]
                ]
            if name == "create_payload_index":
                return None
            if name == "update_collection":
                # Local mode has no graph and no options of vectors.
                more = {"metadata": more["metadata"]}
            found = getattr(self.client, name)(*args, **more)
            if name == "get_collection":
                status = self.statuses.pop(0) if self.statuses else "green"
                update: dict[str, Any] = {"status": models.CollectionStatus(status)}
                if status == "red":
                    wrong = models.OptimizersStatusOneOf1(error="no space left")
                    update["optimizer_status"] = wrong
                found = found.model_copy(update=update)
            return found


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Rest(BaseHTTPRequestHandler):
    stand_in: ClassVar[StandIn]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_PUT = do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.stand_in.headers = {name.lower(): value for name, value in self.headers.items()}
        path = urlsplit(self.path).path
        try:
            found = self._routed(path, json.loads(body or b"null"))
            status, told = 200, {"result": found, "status": "ok", "time": 0.0}
            if path == "/":
                told = found
        except _RefusedError as error:
            status, told = error.status, {"status": {"error": error.message}}
        except Exception as error:
            status = 404 if "not found" in str(error) else 400
            told = {"status": {"error": str(error)}}
        sent = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def _routed(self, path: str, body: Any) -> Any:
        for form, method in _ROUTES:
            verb, pattern = form.split()
            match = re.fullmatch(pattern, path)
            if match and verb == self.command:
                return method(self.stand_in, *map(unquote, match.groups()), body)
        raise _RefusedError(404, f"no such path: {path}")


def _json(found: Any) -> Any:
    return found.model_dump(mode="json")


def _create(server: StandIn, name: str, body: Any) -> Any:
    asked = models.CreateCollection(**body)
    return server.call(
        "create_collection", name, vectors_config=asked.vectors, metadata=asked.metadata,
        hnsw_config=asked.hnsw_config, optimizers_config=asked.optimizers_config,
        quantization_config=asked.quantization_config, shard_number=asked.shard_number,
        replication_factor=asked.replication_factor,
    )  # fmt: skip


def _update(server: StandIn, name: str, body: Any) -> Any:
    asked = models.UpdateCollection(**body)
    return server.call(
        "update_collection", name, metadata=asked.metadata,
        optimizers_config=asked.optimizers_config, quantization_config=asked.quantization_config,
        hnsw_config=asked.hnsw_config, vectors_config=asked.vectors,
    )  # fmt: skip


def _upsert(server: StandIn, name: str, body: Any) -> Any:
    return _json(server.call("upsert", name, points=models.PointsList(**body).points))


def _retrieve(server: StandIn, name: str, body: Any) -> Any:
    asked = models.PointRequest(**body)
    found = server.call(
        "retrieve", name, ids=asked.ids, with_payload=asked.with_payload,
        with_vectors=asked.with_vector,
    )  # fmt: skip
    return [_json(each) for each in found]


def _delete(server: StandIn, name: str, body: Any) -> Any:
    kind = models.PointIdsList if "points" in body else models.FilterSelector
    return _json(server.call("delete", name, points_selector=kind(**body)))


def _scroll(server: StandIn, name: str, body: Any) -> Any:
    asked = models.ScrollRequest(**body)
    points, offset = server.call(
        "scroll", name, scroll_filter=asked.filter, limit=asked.limit, offset=asked.offset,
        with_payload=asked.with_payload, with_vectors=asked.with_vector,
    )  # fmt: skip
    return {"points": [_json(each) for each in points], "next_page_offset": offset}


def _query(server: StandIn, name: str, body: Any) -> Any:
    asked = models.QueryRequestBatch(**body).searches
    return [_json(each) for each in server.call("query_batch_points", name, requests=asked)]


def _aliases(server: StandIn, body: Any) -> Any:
    actions = models.ChangeAliasesOperation(**body).actions
    return server.call("update_collection_aliases", change_aliases_operations=actions)


_ONE = "/collections/([^/]+)"
_ROUTES: list[tuple[str, Callable[..., Any]]] = [
    ("GET /", lambda server, _: {"title": "stand-in", "version": server.release}),
    ("GET /collections", lambda server, _: _json(server.call("get_collections"))),
    ("GET /aliases", lambda server, _: _json(server.call("get_aliases"))),
    ("POST /collections/aliases", _aliases),
    (f"PUT {_ONE}", _create),
    (f"PATCH {_ONE}", _update),
    (f"GET {_ONE}", lambda server, name, _: _json(server.call("get_collection", name))),
    (f"DELETE {_ONE}", lambda server, name, _: server.call("delete_collection", name)),
    (f"PUT {_ONE}/points", _upsert),
    (f"POST {_ONE}/points", _retrieve),
    (f"POST {_ONE}/points/delete", _delete),
    (f"POST {_ONE}/points/scroll", _scroll),
    (f"POST {_ONE}/points/query/batch", _query),
    (f"POST {_ONE}/points/count", lambda server, name, _: _json(server.call("count", name))),
    (
        f"PUT {_ONE}/index",
        lambda server, name, body: (
            server.call("create_payload_index", name, **body)
            or {"operation_id": 0, "status": "completed"}
        ),
    ),
]


class _Face:
    """Every method of a gRPC face, with errors told as a server tells them."""

    def __init__(self, server: StandIn) -> None:
        self.server = server

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name[0].isupper():
            return found

        def answered(request: Any, context: Any) -> Any:
            self.server.headers = dict(context.invocation_metadata())
            try:
                return found(request, context)
            except _RefusedError as error:
                code = {401: "UNAUTHENTICATED"}.get(error.status, "UNAVAILABLE")
                context.abort(grpc.StatusCode[code], error.message)
            except Exception as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return answered


class _Root(_Face, qdrant_pb2_grpc.QdrantServicer):
    def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        return messages.HealthCheckReply(title="stand-in", version=self.server.release)


class _Collections(_Face, collections_service_pb2_grpc.CollectionsServicer):
    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self.server.call("get_collection", request.collection_name)
        told = RestToGrpc.convert_collection_info(found)
        return messages.GetCollectionInfoResponse(result=told, time=0.0)

    def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        names = [each.name for each in self.server.call("get_collections").collections]
        found = [messages.CollectionDescription(name=each) for each in names]
        return messages.ListCollectionsResponse(collections=found)

    def ListAliases(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = [
            messages.AliasDescription(
                alias_name=each.alias_name, collection_name=each.collection_name
            )
            for each in self.server.call("get_aliases").aliases
        ]
        return messages.ListAliasesResponse(aliases=found)

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.server.call(
            "create_collection",
            request.collection_name,
            vectors_config=GrpcToRest.convert_vectors_config(request.vectors_config),
            metadata=GrpcToRest.convert_payload(request.metadata),
            hnsw_config=GrpcToRest.convert_hnsw_config_diff(request.hnsw_config),
            optimizers_config=GrpcToRest.convert_optimizers_config_diff(request.optimizers_config),
            quantization_config=request.HasField("quantization_config") or None,
            shard_number=request.shard_number,
            replication_factor=request.replication_factor,
        )
        return messages.CollectionOperationResponse(result=True)

    def Update(self, request: Any, context: Any) -> Any:  # noqa: N802
        optimizers = quantization = graph = vectors = None
        if request.HasField("hnsw_config"):
            graph = GrpcToRest.convert_hnsw_config_diff(request.hnsw_config)
        if request.HasField("vectors_config"):
            vectors = GrpcToRest.convert_vectors_config_diff(request.vectors_config)
        if request.HasField("optimizers_config"):
            optimizers = GrpcToRest.convert_optimizers_config_diff(request.optimizers_config)
        if request.HasField("quantization_config"):
            quantization = GrpcToRest.convert_quantization_config_diff(request.quantization_config)
        self.server.call(
            "update_collection",
            request.collection_name,
            metadata=GrpcToRest.convert_payload(request.metadata) or None,
            optimizers_config=optimizers,
            quantization_config=quantization,
            hnsw_config=graph,
            vectors_config=vectors,
        )
        return messages.CollectionOperationResponse(result=True)

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.server.call("delete_collection", request.collection_name)
        return messages.CollectionOperationResponse(result=True)

    def UpdateAliases(self, request: Any, context: Any) -> Any:  # noqa: N802
        actions = [GrpcToRest.convert_alias_operations(each) for each in request.actions]
        self.server.call("update_collection_aliases", change_aliases_operations=actions)
        return messages.CollectionOperationResponse(result=True)


class _Points(_Face, points_service_pb2_grpc.PointsServicer):
    def _done(self) -> Any:
        status = messages.UpdateStatus.Completed
        return messages.PointsOperationResponse(
            result=messages.UpdateResult(operation_id=0, status=status)
        )

    def Upsert(self, request: Any, context: Any) -> Any:  # noqa: N802
        points = [GrpcToRest.convert_point_struct(each) for each in request.points]
        self.server.call("upsert", request.collection_name, points=points)
        return self._done()

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        selector = GrpcToRest.convert_points_selector(request.points)
        self.server.call("delete", request.collection_name, points_selector=selector)
        return self._done()

    def CreateFieldIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.server.call("create_payload_index", request.collection_name, request.field_name)
        return self._done()

    def Count(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self.server.call("count", request.collection_name).count
        return messages.CountResponse(result=messages.CountResult(count=found))

    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self.server.call(
            "retrieve",
            request.collection_name,
            ids=[GrpcToRest.convert_point_id(each) for each in request.ids],
            with_payload=True,
            with_vectors=True,
        )
        return messages.GetResponse(result=[RestToGrpc.convert_record(each) for each in found])

    def Scroll(self, request: Any, context: Any) -> Any:  # noqa: N802
        offset = request.offset if request.HasField("offset") else None
        points, place = self.server.call(
            "scroll",
            request.collection_name,
            scroll_filter=GrpcToRest.convert_filter(request.filter),
            limit=request.limit,
            offset=None if offset is None else GrpcToRest.convert_point_id(offset),
            with_payload=True,
            with_vectors=True,
        )
        after = None if place is None else RestToGrpc.convert_extended_point_id(place)
        found = [RestToGrpc.convert_record(each) for each in points]
        return messages.ScrollResponse(result=found, next_page_offset=after)

    def QueryBatch(self, request: Any, context: Any) -> Any:  # noqa: N802
        asked = [GrpcToRest.convert_query_points(each) for each in request.query_points]
        found = self.server.call("query_batch_points", request.collection_name, requests=asked)
        return messages.QueryBatchResponse(
            result=[
                messages.BatchResult(
                    result=[
                        messages.ScoredPoint(
                            id=RestToGrpc.convert_extended_point_id(point.id),
                            payload=payload_to_grpc(point.payload),
                            score=point.score,
                        )
                        for point in each.points
                    ]
                )
                for each in found
            ]
        )
