"""A build in a process of its own, which waits after some of its shards to be killed."""

import sys
import time
from pathlib import Path
from typing import Any

from tests.objects.helpers import build
from whiten_index.artifacts.cached_storage import BucketStorage

if __name__ == "__main__":
    corpus, out, shards, signal = sys.argv[1:]
    real, pushed = BucketStorage.push, []

    def push(self: BucketStorage, path: Path) -> None:
        if path.parent.name == "segments":
            if len(pushed) == int(shards):
                Path(signal).touch()
                time.sleep(600)
            pushed.append(path)
        real(self, path)

    patched: Any = BucketStorage
    patched.push = push
    build(corpus, out=out)
