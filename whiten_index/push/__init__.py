"""The rows of an index in another database: filled, checked, swapped in, and kept up to date."""

from whiten_index.push.config import PushConfig
from whiten_index.push.report import PushReport
from whiten_index.push.run import push_index, pushed_version

__all__ = ["PushConfig", "PushReport", "push_index", "pushed_version"]
