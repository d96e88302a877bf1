"""What is read from a `RunnableConfig`, checked.

Rules of this module:

- A config that does not say what a call needs is refused here, before anything is stored, by naming what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from langchain_core.runnables import RunnableConfig

T = TypeVar("T")


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
    if not isinstance(value, str):
        raise TypeError(f"thread_id must be a str, not {type(value).__name__}: {value!r}")
    if not value:
        raise ValueError("thread_id is empty: give every conversation an id of its own")
    return value


def checked_namespace(value: Any) -> str:
    """A namespace.

    Raises:
        TypeError: If it is no text.
    """
    if not isinstance(value, str):
        raise TypeError(f"checkpoint_ns must be a str, not {type(value).__name__}: {value!r}")
    return value


def checked_id(value: Any) -> str | None:
    """A checkpoint id, `None` where there is none.

    Raises:
        TypeError: If it is no text.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"checkpoint_id must be a str, not {type(value).__name__}: {value!r}")
    return value or None


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
    for each in names:
        if not isinstance(each, str):
            raise TypeError(f"{name} must be strings, not {type(each).__name__}: {each!r}")
    return names


def config_of(thread_id: Any, namespace: str, checkpoint_id: str) -> RunnableConfig:
    """The config that points at a checkpoint."""
    return {
        "configurable": {"thread_id": thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id},
    }
