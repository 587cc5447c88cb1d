"""Where the public sets are: the folder that WHITEN_INDEX_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

from whiten_index.artifacts.files import exists
from whiten_index.errors import ConfigError

VARIABLE = "WHITEN_INDEX_DATA"


def data_path(name: str) -> Path:
    """Return the path of a public file or folder, such as ``sts/sts_raw.parquet``.

    Raises:
        ConfigError: the variable is not set, or there is nothing of that name.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise ConfigError(
            f"no data is named and {VARIABLE} is not set; name the files, or set it to the folder "
            f"that holds {name}"
        )
    path = Path(folder) / name
    if not exists(path):
        raise ConfigError(f"{VARIABLE} is {folder}, which has no {name}; name the files instead")
    return path
