"""Texts of strangers that messages and filters look through: in a time that grows as the text."""

import pytest

from whiten_index.corpus.row_filter import RowFilter
from whiten_index.errors import ConfigError, hide_secrets, secret_in

LONG = 200_000
ADDRESSES = {
    "commas": "a://h" + "," * 60 + ":x",
    **{f"many {sign}": "http://h/" + sign * LONG for sign in (":", "@", ",", "[", "?", ";", "/")},
    "users in a path": "http://h/" + ":@" * LONG,
    "chains": "http://h::" * (LONG // 10),
    "addresses": "http://h/a " * (LONG // 10),
    "spaces": "password" + " " * LONG,
    "words": " password" * (LONG // 10),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ADDRESSES)
def test_what_looks_like_an_address_is_looked_through_once(name: str) -> None:
    # An error of Python's parser of addresses would end the process of a server.
    assert isinstance(hide_secrets(ADDRESSES[name]), str)
    assert isinstance(secret_in(ADDRESSES[name]), str)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("quotes", ["\\'" * LONG, '\\"' * LONG])
def test_a_string_that_does_not_end_is_refused_at_once(quotes: str) -> None:
    for condition in (f"x == '{quotes}", f"x == {quotes}\\"):
        with pytest.raises(ConfigError):
            RowFilter.parse(condition)


@pytest.mark.timeout(60)
def test_doubled_quotes_are_joined_once() -> None:
    assert RowFilter.parse("x == '" + "a''" * (6 * LONG) + "'").columns == ("x",)


@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("postgresql://h1,h2:5432,h3/db", False), ("postgresql://[::1]:5432,h2/db", False),
        ("postgresql://u:pw@h1,h2/db", True), ("http://h/a:b@c", True), ("http://h/a:b/c@d", False),
        ("http://h/a@b:c", False), ("http://h,x:y@z/", True),
    ],
)  # fmt: skip
def test_hosts_and_paths_with_passwords_are_told_from_others(address: str, hidden: bool) -> None:
    assert (secret_in(address) != "") == hidden
