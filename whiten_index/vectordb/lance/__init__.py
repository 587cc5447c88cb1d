"""LanceDB: a folder, or a prefix of an object store, that a client reads with no server.

What users query is the table of the name alone, by ``lancedb.connect(folder).open_table(name)``:
``id``, ``vector`` and the kept columns, each of its Arrow type (``lance.rows`` tells of the few
that the engine cannot keep). What the rows are is in the metadata of the field ``id``, and so in
the same commit as the rows.

*A new table.* LanceDB has no rename, its branches cannot be merged, and a tag has to be asked
for by name. So a table is filled in a table ``<name>__pending``, each append a commit, and
published by **one commit that overwrites** the table of the name with the rows of the pending one,
read in slices. Who has the table open goes on reading the version that was there, for
``keep_days``; who opens it has the old rows or the new ones; cut off before the commit, the old
ones stay. An overwrite drops indexes, so the index is built twice: on the pending table, where it
is checked, and on the published one after the commit. Until that is done searches read all vectors:
the answers are right, and slower. A swap that was cut off there is ended by the next push, by
``discard``.

*Changes* wait in a temporary file; two million ids at most, which wait in memory. They are tried
and looked at on a branch, which users do not see, and then made in the table: one commit puts all
rows, the next takes away what is to go. (One ``merge_insert`` can do both, and then it holds all
vectors of the table in memory.) Before the first the table is marked with the version to come, and
the mark goes with the last; an error puts the version before back. Where the process is killed in
between, the mark stays, and the next push sends what differs from either version.

*Two pushes at once.* The engine has no locks, but no commit is made on top of a ``restore`` or an
overwrite that its writer has not seen. Who takes rows up marks them with a word of its own and
restores the version that they have: whatever another push has under way is refused by the engine,
and all that it tries later by the mark.

*Old versions* are dropped ``keep_days`` after they were replaced, whenever a table is
published or changes have left more than ten small files, which are then merged.

Under 1,000 rows no index is built, whatever the options say. A vector of zeros has no cosine: its
row is kept and fetched, and no search by cosines finds it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from whiten_index.errors import ConfigError

if TYPE_CHECKING:
    from whiten_index.vectordb.lance.lance_writer import LanceWriter

__all__ = ["connect"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def connect(
    address: str, name: str, options: Mapping[str, str], *, make: bool = True
) -> LanceWriter:
    """Open a folder or a prefix of an object store, which need not be there yet.

    Args:
        address: ``lancedb:///absolute/folder``, or ``lancedb+s3://bucket/prefix`` (gs, az), with
            credentials in the variables that the object store's clients read.
        name: of the table: at most 200 letters and digits of ASCII, ``_``, ``-`` and ``.``.
        options: see ``LanceOptions``, and ``storage.NAME`` for the object store.
        make: whether to make a folder that is not there.

    Raises:
        ConfigError: the address, the name or an option cannot be used.
        DatabaseError: the folder cannot be reached, or is not there and is not to be made.
    """
    # The client is loaded here, so that options are read without it.
    from whiten_index.vectordb.lance.lance_writer import LanceWriter
    from whiten_index.vectordb.lance.options import LanceOptions
    from whiten_index.vectordb.lance.place import PENDING, Place

    if not _NAME.fullmatch(name) or name.endswith(PENDING):
        raise ConfigError(
            f"LanceDB cannot give a table the name {name[:100]!r}; use 1 to 200 letters and digits "
            f"of ASCII, _, - and ., and another end than {PENDING}"
        )
    return LanceWriter(Place(address, name, LanceOptions.parse(options), make=make))
