"""Options that name sets of sentence pairs, and their reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from whiten_index.cli.eval_commands import parse_splits

if TYPE_CHECKING:
    from whiten_index.evaluation.sts_sets import StsSet

pair_options = [
    click.argument("data", nargs=-1),
    click.option("--set", "names", multiple=True, help="Only this set, such as STS12; repeatable."),
    click.option(
        "--split",
        "splits",
        multiple=True,
        callback=parse_splits,
        help="SET=SPLIT, the split that is scored, or all; repeatable. [default: STS-B=test, all "
        "pairs of others]",
    ),
]


def read_pairs(
    data: Sequence[str], names: Sequence[str], splits: Mapping[str, str]
) -> list[StsSet]:
    """Return the sets of the files named, or of the public ones, those called ``names``."""
    from whiten_index.evaluation.sts_sets import chosen_sets, read_sts
    from whiten_index.measure.eval_config import data_path

    paths = data or (str(data_path("sts/sts_raw.parquet")),)
    return chosen_sets(read_sts(paths, splits=splits), names)
