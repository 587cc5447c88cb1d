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
    EndpointError,
    NotFoundError,
    RefusedTextError,
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


def told(error: Exception) -> str:
    """Return the message of an error, without what may quote the texts of other requests."""
    return error.plain if isinstance(error, EndpointError) else str(error)


async def answer(request: Request, error: Exception) -> Response:
    """Answer an error: one that nobody foresaw without its text."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, WhitenIndexError):
        status, detail = HTTPStatus.SERVICE_UNAVAILABLE, told(error)
        if isinstance(error, NotFoundError):
            status = HTTPStatus.NOT_FOUND
        elif isinstance(error, ConfigError | CorpusError | RefusedTextError):
            status = HTTPStatus.BAD_REQUEST
        else:
            _LOG.error("%s: %s", request.url.path, detail)
    elif isinstance(error, RequestValidationError):
        # The first finding, and where it is.
        found = error.errors()[0]
        where = f"{found['loc'][1]}: " if len(found["loc"]) > 1 else ""
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        detail = where + str(found["msg"]).removeprefix("Value error, ")
    elif isinstance(error, HTTPException):
        # A wrong path or method, or a body that is too large.
        status, detail, headers = HTTPStatus(error.status_code), str(error.detail), error.headers
    else:
        _LOG.error("%s failed", request.url.path, exc_info=error)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        detail = "an unforeseen error; see the server's log"
    return problem(status, detail, headers=headers)
