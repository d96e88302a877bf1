"""What is read from a `RunnableConfig`, checked.

Rules of this module:

- A config that does not say what a call needs is refused here, before anything is stored, by naming what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from langchain_core.runnables import RunnableConfig

from lsm.format.records import Version

T = TypeVar("T")


def text(name: str, value: Any) -> str:
    """A text; what is derived from `str` (a member of a `StrEnum`) is taken as the text that it is.

    Args:
        name: What it is, for the error.
        value: What is given.

    Raises:
        TypeError: If it is no text.
    """
    if type(value) is str:
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {value!r:.80}")
    return str.__str__(value)


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """A mapping. Takes and raises what `text` does."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, not {type(value).__name__}: {value!r:.80}")
    return value


def version(channel: str, value: Any) -> Version:
    """The version of a channel, as a plain `str`, `int`, `float` or `bool`.

    Raises:
        TypeError: If it is none of these.
    """
    if type(value) in (str, int, float, bool):
        return value  # type: ignore[no-any-return]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__pos__(value)
    if isinstance(value, float):
        return float.__pos__(value)
    raise TypeError(f"channel {channel!r} has version {value!r:.80}, which is no str, int or float")


def versions(name: str, value: Any) -> dict[str, Version]:
    """The versions of channels. Raises what `version` raises."""
    found: dict[str, Version] = {}
    for channel, each in mapping(name, value).items():
        if type(channel) is type(each) is str:  # nearly always
            found[channel] = each
        else:
            found[text("a channel", channel)] = version(channel, each)
    return found


class Address(NamedTuple):
    """What a config points at."""

    thread_id: str
    namespace: str
    checkpoint_id: str | None


def _configurable(config: RunnableConfig | None) -> dict[str, Any]:
    configurable = (config or {}).get("configurable")
    if not isinstance(configurable, dict):
        raise ValueError('the config has no "configurable": pass {"configurable": {"thread_id": ...}}')
    return configurable


def checked_thread_id(value: Any) -> str:
    """A thread id as text. Numbers are taken as their text, as LangGraph's database savers take them.

    Raises:
        ValueError: If it is missing or empty.
        TypeError: If it is no text.
    """
    if value is None:
        raise ValueError('the config has no thread_id: pass {"configurable": {"thread_id": ...}}')
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    thread_id = text("thread_id", value)
    if not thread_id:
        raise ValueError("thread_id is empty: give every conversation an id of its own")
    return thread_id


def checked_namespace(value: Any) -> str:
    """A namespace.

    Raises:
        TypeError: If it is no text.
    """
    return text("checkpoint_ns", value)


def checked_id(value: Any) -> str | None:
    """A checkpoint id, `None` where there is none.

    Raises:
        TypeError: If it is no text.
    """
    return None if value is None else text("checkpoint_id", value) or None


def address(config: RunnableConfig) -> Address:
    """The thread, namespace and checkpoint of a config.

    Raises:
        ValueError: If it has no thread id, or an empty one.
        TypeError: If one of them is no text.

    Example:
        >>> address({"configurable": {"thread_id": "1"}})
        Address(thread_id='1', namespace='', checkpoint_id=None)
    """
    configurable = _configurable(config)
    return Address(
        checked_thread_id(configurable.get("thread_id")),
        checked_namespace(configurable.get("checkpoint_ns", "")),
        checked_id(configurable.get("checkpoint_id")),
    )


def search(config: RunnableConfig | None) -> tuple[list[str] | None, str | None, str | None]:
    """The threads (`None` for all), namespace and checkpoint id that a listing is limited to."""
    if config is None:
        return None, None, None
    configurable = _configurable(config)
    namespace = configurable.get("checkpoint_ns")
    return (
        [checked_thread_id(configurable.get("thread_id"))],
        None if namespace is None else checked_namespace(namespace),
        checked_id(configurable.get("checkpoint_id")),
    )


def before_id(config: RunnableConfig | None) -> str | None:
    """The checkpoint id of a `before` config."""
    return checked_id(_configurable(config).get("checkpoint_id")) if config else None


def checked_sequence(values: Iterable[T], name: str) -> list[T]:
    """Several ids or names, as a list.

    Raises:
        TypeError: If it is a single string.
    """
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{name} must be a sequence, not a single {type(values).__name__}: pass [{values!r}]?")
    return list(values)


def checked_names(values: Iterable[str], name: str) -> list[str]:
    """Several names.

    Raises:
        TypeError: If it is a single string, or something in it is none.
    """
    names = checked_sequence(values, name)
    return [text(f"each of {name}", each) for each in names]


def config_of(thread_id: Any, namespace: str, checkpoint_id: str) -> RunnableConfig:
    """The config that points at a checkpoint."""
    return {
        "configurable": {"thread_id": thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id},
    }
