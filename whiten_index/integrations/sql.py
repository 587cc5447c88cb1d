"""The transform as a function of PostgreSQL, so that a database reduces raw embeddings itself.

The script is for PostgreSQL 13 and pgvector 0.7, or later. The matrix is in the function as
constants and no table is read, so the function is IMMUTABLE: usable in a generated column and in an
index, and computed once if its argument is a constant. Behind a parameter,
``(SELECT whiten($1::vector))`` makes sure of that. Each term is one inner product of pgvector.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import replacing, require_path, require_replaceable
from whiten_index.artifacts.files import read_bytes, writing
from whiten_index.errors import ConfigError
from whiten_index.search.query_transform import QueryTransform
from whiten_index.vectordb.engine_support import literal, quoted
from whiten_index.whitening.transform import Whitening

RUN = "psql -v ON_ERROR_STOP=1 -f"
_MARK = "-- Made by whiten-index."
_MOST_BYTES = 1 << 30
# Begins the last line of a script, which has the digest of those before: users add to scripts.
_DIGEST = b"-- BLAKE2b of the lines above: "
# First words of the comment of a function.
_OURS = "whiten-index: "
_TYPES = {"float32": "vector", "float16": "halfvec"}

_SCRIPT = Path(__file__).with_name("sql_function.sql").read_text("utf-8")


def export_sql(
    transform: QueryTransform,
    file: Path | str,
    *,
    name: str = "whiten",
    schema: str = "public",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Write a script that makes a function of the transform, in one transaction.

    The function takes a raw embedding, a ``vector`` of d numbers, and returns its whitened vector
    of k, of unit length unless the index ranks by dot product; NULL for NULL. It refuses another
    width. Run again, the script replaces the function; earlier results in generated columns and
    indexes stay. It replaces no function that whiten-index did not make. The schema must be there.
    Of dtype float32 it returns a ``vector``, of float16 a ``halfvec``.

    Return ``bytes`` and the ``dtype`` of its vectors.
    """
    if dtype not in _TYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; use {' or '.join(_TYPES)}")
    if not (name + schema).isprintable():
        raise ConfigError(f"--name {name!r} or --schema {schema!r} is not printable; give another")
    function = f"{quoted(schema)}.{quoted(name)}"
    facts = _facts(transform)
    whitening, affine = transform.whitening, transform.whitening.export()
    # pgvector has the negative of the inner product.
    terms = ",\n    ".join(f"-(embedding <#> {_vector(column)})" for column in affine.matrix.T)
    data = _SCRIPT.format(
        mark=_MARK,
        run=RUN,
        facts=facts,
        # In no name that anybody chose.
        tag=f"$whiten_{transform.query_digest}$",
        signature=literal(f"{function}(vector)"),
        ours=literal(_OURS),
        name=function,
        type=_TYPES[dtype],
        # In units of one operator: the planner's price of a call.
        cost=transform.k,
        dim=transform.dim,
        steps="\n".join(f"  embedding := {step};" for step in _steps(whitening)),
        scaled="l2_normalize" if whitening.similarity == "cosine" else "",
        terms=terms,
        comment=literal(_OURS + facts),
    ).encode()
    data += _last_line(data)
    path = require_path(file)
    require_replaceable(path, _is_function, "an exported function")
    with writing(path, kept=""), replacing(path) as temporary:
        temporary.write_bytes(data)
    return {"bytes": len(data), "dtype": dtype}


def _is_function(path: Path) -> bool:
    try:
        data = read_bytes(path, limit=_MOST_BYTES)
    except ValueError:
        return False
    lines = data[: data.rfind(_DIGEST)]
    return _MARK.encode() in lines and data == lines + _last_line(lines)


def _last_line(data: bytes) -> bytes:
    return _DIGEST + hashlib.blake2b(data).hexdigest().encode() + b"\n"


def _steps(whitening: Whitening) -> list[str]:
    """Return what comes before the product."""
    # The mean is subtracted first, where a bias would be rounded as the large sums it is added to.
    # It is subtracted as the sum of two float32 numbers: one would round it, by which every vector
    # is then off. The first difference is exact far from the origin (Sterbenz).
    steps = ["l2_normalize(embedding)"] if whitening.normalize_input else []
    if whitening.center:
        high = whitening.mean.astype(np.float32)
        low = (whitening.mean - high).astype(np.float32)
        steps += [f"embedding - {_vector(part)}" for part in (high, low)]
    return steps


def _vector(numbers: NDArray[np.float32]) -> str:
    """Return a literal; each number in the fewest digits that give it back."""
    return f"'[{','.join(map(str, numbers))}]'::vector"


def _facts(transform: QueryTransform) -> str:
    """Return one line of what this is the transform of; all who use the database may read it."""
    spec = transform.spec
    encoder = spec.name if spec else f"column {transform.encoder_facts.get('column', '')}"
    facts = (
        f"query digest {transform.query_digest}",
        f"{transform.whitening.kind.value} {transform.dim} -> {transform.k}, "
        f"by {transform.whitening.similarity}",
        f"encoder {encoder} {transform.fingerprint}",
        f"index version {transform.version}",
    )
    line = " ".join("; ".join(facts).split())
    # Also bytes of a path that are no text, which Python has as surrogates.
    return "".join(letter if letter.isprintable() else "?" for letter in line)
