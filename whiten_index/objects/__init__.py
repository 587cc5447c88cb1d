"""Object stores: a bucket that counts, and a folder with copies of what was read or written."""

from whiten_index.objects.bucket import ChangedError, Tag
from whiten_index.objects.copies import stamp
from whiten_index.objects.here import HERE, Here, Place
from whiten_index.objects.mirror import Mirror, naming, place_of, settled

__all__ = [
    "HERE",
    "ChangedError",
    "Here",
    "Mirror",
    "Place",
    "Tag",
    "naming",
    "place_of",
    "settled",
    "stamp",
]
