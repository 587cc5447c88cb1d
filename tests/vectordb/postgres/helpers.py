"""What tests of PostgreSQL share."""

import itertools
from collections.abc import Callable
from typing import Any

SECRET = "s3cr3t-word"
NUMBERS = itertools.count()
Run = Callable[..., list[tuple[Any, ...]]]


def connected(address: str) -> Any:
    # The default suite, which installs no client, collects files that import this one.
    import psycopg

    return psycopg.connect(address, autocommit=True)


def as_role(address: str, role: str) -> str:
    return address.replace("postgres:@", f"{role}@")
