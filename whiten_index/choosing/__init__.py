"""``--whiten auto``: k, γ and centring chosen from the corpus itself, or from labels."""

from whiten_index.choosing.choose import Wishes, choose_setting
from whiten_index.choosing.labelled import Labels

__all__ = ["Labels", "Wishes", "choose_setting"]
