"""What tests of PostgreSQL share."""

import itertools
from collections.abc import Callable
from typing import Any

from tests.vectordb.pushed_rows import Rows, fill
from whiten_index.vectordb.registry import open_writer

SECRET = "s3cr3t-word"
NUMBERS = itertools.count()
Run = Callable[..., list[tuple[Any, ...]]]


def connected(address: str) -> Any:
    # The default suite, which installs no client, collects files that import this one.
    import psycopg

    return psycopg.connect(address, autocommit=True)


def push_all(address: str, rows: Rows, name: str = "docs", **options: str) -> None:
    with open_writer(address, name, options=options) as writer:
        fill(writer, rows)


def as_role(address: str, role: str) -> str:
    return address.replace("postgres:@", f"{role}@")
