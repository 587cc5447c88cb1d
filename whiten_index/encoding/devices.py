"""Devices of a job; torch loads only where there may be a GPU."""

from __future__ import annotations

from whiten_index.artifacts.files import list_folder
from whiten_index.errors import ConfigError

_WINDOW_ROWS_FACTOR_ON_A_GPU = 4


def chosen_devices(asked: str) -> tuple[str, ...]:
    """Return the devices that encode side by side, one process each where there are several."""
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
