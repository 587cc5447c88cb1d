"""Prompts: the text put before documents and queries, chosen as text or by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whiten_index.errors import ConfigError


def require_one(text: str | None, name: str | None, option: str) -> None:
    """Refuse a prompt given both as text and by name.

    Raises:
        ConfigError: both were given.
    """
    if text is not None and name is not None:
        raise ConfigError(f"{option} and {option}-name were both given; leave one of them out")


def choose_prompt(
    prompts: Mapping[str, str],
    *,
    text: str | None,
    name: str | None,
    defaults: Sequence[str],
    option: str,
    model: str,
) -> str:
    """Return the prompt asked for, else the first of ``defaults`` that the model has, else none.

    Args:
        prompts: name -> prompt, the model's own.
        text: the prompt itself, as asked for.
        name: of one of ``prompts``, as asked for.
        defaults: names to look for where neither was given.
        option: of the command line, for messages: ``--document-prompt``.
        model: its name, for messages.

    Raises:
        ConfigError: the model has no prompt of that name.
    """
    if text is not None:
        return text
    if name is None:
        return next((prompts[each] for each in defaults if prompts.get(each)), "")
    if name in prompts:
        return prompts[name]
    names = ", ".join(sorted(prompts))
    known = f"it has {names}; name one of these, or" if prompts else "it has none;"
    raise ConfigError(
        f"{option}-name {name!r} is no prompt of {model}: {known} give the text with {option}"
    )


def prompt_tokens(tokenizer: Any, prompt: str) -> int:
    """Return how many tokens a prompt puts before a text, the special ones in front included.

    As in sentence-transformers: the prompt is tokenised alone, and a special token at its end,
    which in the whole text stands behind the text, is not counted.

    Args:
        tokenizer: a transformers tokenizer, fast or slow.
        prompt: as it is put before texts, lowered where they are.
    """
    if not prompt:
        return 0
    ids = tokenizer(prompt, truncation=False, verbose=False)["input_ids"]
    return len(ids) - int(bool(ids) and ids[-1] in tokenizer.all_special_ids)
