"""Which devices a job uses; torch loads only where there may be a GPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whiten_index.artifacts.files import list_folder
from whiten_index.errors import ConfigError
from whiten_index.whitening.moments import MEAN_OF_EVERY, Moments

_WINDOW_ROWS_FACTOR_ON_A_GPU = 4


def chosen_devices(asked: str) -> tuple[str, ...]:
    """Return the devices that encode side by side, one process each where there are several.

    Args:
        asked: ``auto`` (every GPU that torch sees, else what there is), one device such as
            ``cpu``, ``cuda:1`` or ``mps``, or several with commas between, such as
            ``cuda:0,cuda:1``.

    Raises:
        ConfigError: a name is empty.
    """
    names = tuple(name.strip() for name in asked.split(","))
    if "" in names or (len(names) > 1 and "auto" in names):
        raise ConfigError(
            f"--device {asked!r} is not understood; use auto, cpu, cuda, cuda:1, or several with "
            "commas between, such as cuda:0,cuda:1"
        )
    if names == ("auto",) and list_folder("/dev", "nvidia[0-9]*"):
        import torch

        count = torch.cuda.device_count()
        return tuple(f"cuda:{number}" for number in range(count)) or names
    return names


def window_factor(device: str) -> int:
    """Return how many full shards are encoded together on a device."""
    return _WINDOW_ROWS_FACTOR_ON_A_GPU if device.startswith("cuda") else 1


_BLOCK_ROWS = 8192


@torch.inference_mode()
def moments_on_device(rows: Tensor) -> Moments:
    """Return the moments of rows (n, d) on any device that computes in float64.

    Shifts, products and sums are those of ``Moments.of``, in float64 and block by block; only the
    order of the additions differs.
    """
    n, d = rows.shape
    if n == 0:
        return Moments.empty(d)
    point = rows[::MEAN_OF_EVERY].mean(dim=0, dtype=torch.float64)
    first, third = (torch.zeros_like(point) for _ in range(2))
    second, fourth = point.new_zeros(d, d), point.new_zeros(())
    for i in range(0, n, _BLOCK_ROWS):
        y = rows[i : i + _BLOCK_ROWS].double() - point
        square = torch.linalg.vecdot(y, y)
        first += y.sum(dim=0)
        second.addmm_(y.T, y)
        third.addmv_(y.T, square)
        fourth += square @ square
    return Moments.from_sums(
        _array(point),
        count=float(n),
        first=_array(first),
        # A general product does not promise to be symmetric to the bit.
        second=_array((second + second.T) / 2),
        third=_array(third),
        fourth=float(fourth),
    )


def _array(values: Tensor) -> NDArray[np.float64]:
    return np.asarray(values.cpu().numpy(), dtype=np.float64)
