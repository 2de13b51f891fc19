"""Whether what was read from JSON has the types that a dataclass, or a table of facts, says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from tfm_export.quotation import quote, shorten

NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "an object", list: "a list"}


def is_number(value: Any) -> bool:
    """Whether it is a number that a float holds; infinite is one."""
    return is_integer(value) or (isinstance(value, float) and not math.isnan(value))


def is_integer(value: Any) -> bool:
    """Whether it is an integer of 64 bits."""
    return type(value) is int and value.bit_length() < 64


# What values of these types must be; all others are instances of their type.
FITS: dict[Any, Callable[[Any], bool]] = {
    Any: lambda _: True,
    int: is_integer,
    float: is_number,
}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, such as int, `dict[str, int]` or `list[str] | None`."""
    if kind in FITS:
        return FITS[kind](value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(k, arguments[0]) and fits(item, arguments[1]) for k, item in value.items()
        )
    if origin is list:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if origin is not None:  # int | None
        return any(fits(value, argument) for argument in arguments)
    return isinstance(value, kind)


def name_of(kind: Any) -> str:
    """A type, for a message."""
    if get_origin(kind) in {dict, list}:
        return NAMES[get_origin(kind)]
    if arguments := get_args(kind):
        return " or ".join(map(name_of, arguments))
    return "null" if kind is type(None) else NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def field_problems(record: Any, prefix: str = "") -> Iterator[str]:
    """What a dataclass has of another type than it says.

    Args:
        record: the dataclass.
        prefix: before the names of its fields: "limits.".
    """
    kinds = get_type_hints(type(record))
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    yield from fact_problems(values, {name: kinds[name] for name in values}, prefix)


def fact_problems(values: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What facts have of another type than a table says; those that are not there, or not in it, are no problem."""
    for name, kind in kinds.items():
        if name in values and not fits(values[name], kind):
            yield f"{shorten(prefix)}{name} must be {name_of(kind)}, found {quote(values[name])}"
