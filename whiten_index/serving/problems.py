"""Errors as problem details (RFC 9457), in the words of the command line."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

import pydantic_core
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from whiten_index.errors import (
    ConfigError,
    CorpusError,
    EncoderError,
    NotFoundError,
    WhitenIndexError,
)

_LOG = logging.getLogger("whiten_index.serving")
PROBLEM = "application/problem+json"


def problem(status: int, detail: str, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response of an error."""
    value = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        "message": detail,  # OpenAI's client shows this one
    }
    return Response(pydantic_core.to_json(value), status, headers, PROBLEM)


async def of_product(_: Request, error: Exception) -> Response:
    """Answer an error that the library raised on purpose."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, NotFoundError):
        status = HTTPStatus.NOT_FOUND
    elif isinstance(error, ConfigError | CorpusError | EncoderError):
        status = HTTPStatus.BAD_REQUEST
    return problem(status, str(error))


async def of_body(_: Request, error: Exception) -> Response:
    """Answer a body that its schema refuses: the first finding, and where it is."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    where = f"{found['loc'][1]}: " if len(found["loc"]) > 1 else ""
    said = str(found["msg"]).removeprefix("Value error, ")
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, where + said)


async def of_http(_: Request, error: Exception) -> Response:
    """Answer a wrong path or method, or a body that is too large."""
    assert isinstance(error, HTTPException)
    return problem(error.status_code, str(error.detail), headers=error.headers)


async def of_unforeseen(request: Request, error: Exception) -> Response:
    """Answer an error that nobody foresaw, without its text."""
    _LOG.error("%s failed", request.url.path, exc_info=error)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "an unforeseen error; see the server's log")


HANDLERS = {
    WhitenIndexError: of_product,
    RequestValidationError: of_body,
    HTTPException: of_http,
    Exception: of_unforeseen,
}
