"""Fills the templates of the pages."""

from __future__ import annotations

from typing import Any

import whiten_index


def fill(template: str, **values: Any) -> str:
    """Return a page; a value that the template needs and does not get is an error.

    Every value is escaped. ``version`` is this release.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("whiten_index", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(version=whiten_index.__version__, **values)
