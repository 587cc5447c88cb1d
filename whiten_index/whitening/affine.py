"""A transform as one matrix and one bias in float32, for programs that know nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from whiten_index.artifacts.atomic import replacing, require_path, require_replaceable
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.tensors import write_tensors
from whiten_index.errors import ConfigError

_KIND, _FORMAT_VERSION = "affine", 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Affine:
    """x̃ ≈ x·matrix + bias in float32."""

    matrix: NDArray[np.float32]  # (d, k)
    bias: NDArray[np.float32]  # (k,), −μW
    normalize_input: bool  # whether rows are scaled to unit length first
    # Estimated on the safe side (2 to 20 times what is measured): the root mean square of the
    # errors of vectors over that of the vectors, with products summed in float32, not in TF32. It
    # grows with ‖μW‖ against the spread; where it is too much, subtract the mean from the
    # embeddings before the product.
    error: float

    def save(self, file: Path | str, *, facts: Mapping[str, str] | None = None) -> Path:
        """Write a safetensors file atomically and return its path.

        It has the tensors ``matrix``, ``bias`` and ``error``; the rest and ``facts`` are metadata.

        Raises:
            ConfigError: the file's ending is not ``.safetensors``, or something else than an
                exported matrix is there.
            StorageError: the file cannot be written.
        """
        path = require_path(file)
        if path.suffix != ".safetensors":
            raise ConfigError(f"a matrix is exported to a .safetensors file; {path.name} is none")
        require_replaceable(path, _is_matrix, "an exported matrix")
        with writing(path, kept=""), replacing(path) as temporary:
            write_tensors(
                temporary,
                {"matrix": self.matrix, "bias": self.bias, "error": np.array([self.error])},
                kind=_KIND,
                version=_FORMAT_VERSION,
                facts={**(facts or {}), "normalize_input": str(self.normalize_input).lower()},
                seal=True,
            )
        return path


def _is_matrix(path: Path) -> bool:
    try:
        with safe_open(path, framework="numpy") as file:
            return bool((file.metadata() or {}).get("kind") == _KIND)
    except SafetensorError:
        return False
