"""Options that stand in one table: a frozen dataclass whose fields an object takes as keyword arguments."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, ClassVar, TypeVar

Table = TypeVar("Table", bound="OptionTable")


def expect_integer(name: str, value: object) -> None:
    """Raises TypeError where a caller's number is no integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an integer, got {value!r}")


def option(default: Any, words: str, holds: Callable[[Any], bool]) -> Any:
    """Makes a field whose values, other than None, `holds` says to be in the range; `words` say what is expected, in an error."""
    return dataclasses.field(default=default, metadata={"words": words, "holds": holds})


def at_least(default: int | None, least: int) -> Any:
    """Makes a field for an integer of `least` or more."""

    def holds(count: Any) -> bool:
        return isinstance(count, int) and not isinstance(count, bool) and count >= least

    return option(default, f"an integer of {least} or more", holds)


@dataclasses.dataclass(frozen=True)
class OptionTable:
    """The base of a table: names, types and defaults are its fields, meanings its docstring.

    Attributes:
        owner: The class that takes the options, which begins an error.
        arguments: Names of the other arguments that the class takes.
        symbols: Other names, as in papers, by which a caller may mean a field or an argument.
    """

    owner: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]] = ()
    symbols: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def named(cls: type[Table], **options: Any) -> Table:
        """Makes a table of the options that a caller has named; a name that no option has is a TypeError."""
        fields = [field.name for field in dataclasses.fields(cls)]
        names = [*cls.arguments, *fields]
        for name in options:
            if name not in fields:
                near = difflib.get_close_matches(cls.symbols.get(name, name), names, n=1)
                meant = f" (did you mean {near[0]}?)" if near else ""
                raise TypeError(f"{cls.owner}: expected one of the options {', '.join(names)}, got {name!r}{meant}")
        return cls(**options)

    def expect_in_range(self) -> None:
        """Raises ValueError where a field is outside of its range; it has the name, what was expected, and the value."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_left_out = value is None and field.default is None
            if field.metadata and not is_left_out and (value is None or not field.metadata["holds"](value)):
                raise ValueError(f"{self.owner}: {field.name}: expected {field.metadata['words']}, got {value!r}")

    @classmethod
    def completed(cls, signature: inspect.Signature) -> inspect.Signature:
        """Returns a signature that ends in `**options`, with the fields and their defaults in that place, for `help()`."""
        given = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        fields = [p for name, p in inspect.signature(cls).parameters.items() if name not in signature.parameters]
        only = inspect.Parameter.KEYWORD_ONLY
        return signature.replace(parameters=[*given, *(p.replace(kind=only) for p in fields)])
