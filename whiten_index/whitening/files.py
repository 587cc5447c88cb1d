"""A fitted transform on disk: safetensors, of format 1 where that says all, else of format 2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from whiten_index.artifacts.tensors import read_tensors, write_tensors
from whiten_index.errors import ArtifactError
from whiten_index.whitening.config import Kind
from whiten_index.whitening.covariance import Estimator

FILE_KIND, FORMAT_VERSION = "whitening", 2
_PLAIN_KINDS = (Kind.NONE, Kind.PCA, Kind.WHITENING)
_FLAGS = {"true": True, "false": False}
_SHAPES = {"mean": "d", "eigenvalues": "d", "basis": "dr", "exponent": "1", "count": "1"}

# What format 2 adds, beside the facts estimator and shuffle.
_ARRAYS = {"basis_variances": "r", "coordinate_scale": "d"}
_NUMBERS = ("shrinkage", "floor")
_INTEGERS = ("remove_top", "groups", "seed")
_ARRAYS_OF: dict[Kind, tuple[str, ...]] = {
    Kind.ZCA_COR: ("basis_variances", "coordinate_scale"),
    Kind.GROUP: ("basis_variances",),
    Kind.RANDOM: ("basis_variances",),
    Kind.TRUNCATE: ("basis_variances",),
}
_INTEGERS_OF: dict[Kind, tuple[str, ...]] = {Kind.GROUP: ("groups",), Kind.RANDOM: ("seed",)}


def write(path: Path | str, fields: Mapping[str, Any]) -> None:
    """Write the fields of a ``Whitening``.

    What earlier releases know is written as they wrote it, so that they can read it.
    """
    tensors = {name: np.atleast_1d(fields[name]) for name in _SHAPES}
    facts = {
        "transform": fields["kind"].value,
        "center": str(fields["center"]).lower(),
        "normalize_input": str(fields["normalize_input"]).lower(),
    }
    plain = _is_plain(fields)
    if not plain:
        added = (*_ARRAYS, *_NUMBERS, *_INTEGERS)
        given = {name: fields[name] for name in added if fields[name] is not None}
        tensors |= {name: np.atleast_1d(value) for name, value in given.items()}
        facts |= {"estimator": fields["estimator"], "shuffle": str(fields["shuffle"]).lower()}
    version = 1 if plain else FORMAT_VERSION
    write_tensors(path, tensors, kind=FILE_KIND, version=version, facts=facts)


def read(path: Path | str) -> dict[str, Any]:
    """Return the fields of a ``Whitening``.

    Raises:
        ArtifactError: the file is missing, damaged or not a whitening.
    """
    tensors, facts = read_tensors(path, kind=FILE_KIND, version=FORMAT_VERSION, shapes=_SHAPES)
    try:
        plain = int(facts["format_version"]) < FORMAT_VERSION
        # Later kinds are none of format 1.
        kind = {kind.value: kind for kind in (_PLAIN_KINDS if plain else Kind)}[facts["transform"]]
        fields: dict[str, Any] = {
            "kind": kind,
            **{name: tensors[name] for name in ("mean", "basis", "eigenvalues")},
            **{name: float(tensors[name][0]) for name in ("exponent", "count")},
            **{name: _FLAGS[facts[name]] for name in ("center", "normalize_input")},
        }
        if not plain:
            fields |= {
                "estimator": Estimator(facts["estimator"]).value,
                "shuffle": _FLAGS[facts["shuffle"]],
            }
    except (KeyError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not plain:
        fields |= _added(path, kind, set(tensors))
    _check_counts(path, fields)
    return fields


def _check_counts(path: Path | str, fields: Mapping[str, Any]) -> None:
    """Refuse numbers of directions and groups that the width has no room for."""
    dim, kept = fields["basis"].shape
    top, groups = fields.get("remove_top", 0), fields.get("groups")
    if not 0 <= top <= dim - kept:
        raise _unreadable(path, f"remove_top {top} and {kept} directions, of {dim}")
    if groups is not None and not (0 < groups <= dim and dim % groups == 0):
        raise _unreadable(path, f"{groups} groups of {dim} channels")


def _unreadable(path: Path | str, why: object) -> ArtifactError:
    return ArtifactError(f"{path} cannot be read as a whitening ({why}); restore it or build again")


def _added(path: Path | str, kind: Kind, held: set[str]) -> dict[str, Any]:
    """Return the tensors of format 2, checked: what the kind needs, and what else is there."""
    needed = {*_ARRAYS_OF.get(kind, ()), *_NUMBERS, "remove_top", *_INTEGERS_OF.get(kind, ())}
    added = {**_ARRAYS, **dict.fromkeys((*_NUMBERS, *_INTEGERS), "1")}
    shapes = {name: shape for name, shape in added.items() if name in held | needed}
    tensors, _ = read_tensors(
        path, kind=FILE_KIND, version=FORMAT_VERSION, shapes={**_SHAPES, **shapes}
    )
    return {
        **{name: tensors[name] for name in _ARRAYS if name in shapes},
        **{name: float(tensors[name][0]) for name in _NUMBERS},
        **{name: int(tensors[name][0]) for name in _INTEGERS if name in shapes},
    }


def _is_plain(fields: Mapping[str, Any]) -> bool:
    """Whether format 1 says all there is to say."""
    beyond = (*_ARRAYS, *_NUMBERS, *_INTEGERS, "shuffle")
    return (
        fields["kind"] in _PLAIN_KINDS
        and fields["estimator"] == Estimator.EMPIRICAL.value
        and not any(fields[name] is not None and np.any(fields[name]) for name in beyond)
    )
