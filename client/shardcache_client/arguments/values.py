"""Arguments of datasets, loaders and mixtures: rules for the values that each accepts.

`checked` wraps a function with the rules of its arguments. A rule (`Accepts`) tells which values an
argument may have, and converts each to a form that the function can rely on. Every error is a
ConfigError that names the class or function that was called, the argument, the value given, and a
value to write instead.

The module also has the type variables of datasets, loaders and mixtures: `T_co` for the items of a
dataset, `B_co` for the batches of a loader.
"""

import difflib
import inspect
import operator
import os
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.protocol import MAX_JOB_CHARS

if TYPE_CHECKING:
    # Type variables with defaults (PEP 696) are in the standard library from 3.13 on. Only type
    # checkers need the defaults.
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=dict[str, Any])
    B_co = TypeVar("B_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
    B_co = TypeVar("B_co", covariant=True)

U = TypeVar("U")
F = TypeVar("F", bound=Callable[..., Any])

_MAX_SHOWN_CHARS = 100  # maximum number of characters of a value that an error shows
_MAX_WHOLE = 2**62  # the largest whole number that a dataset's state can hold
_SEED_BITS = 256
MAX_PROCESSES = 2**20  # maximum number of ranks or nodes
MAX_BATCH = 2**31 - 1  # maximum number of samples in a batch, or of shards in a window
MAX_WORKERS = 4_096  # maximum number of a loader's workers
# Pipes are polled with a timeout in milliseconds, which must fit into 31 bits.
_MAX_TIMEOUT_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Accepts:
    """The values that an argument accepts, and the form to which they are converted.

    Attributes:
        description: describes the values in the remedy "give ...".
        converted: returns an accepted value in the form that the function gets; raises TypeError or
            ValueError for any other value.
    """

    description: str
    converted: Callable[[Any], Any]

    def or_none(self, description: str = "None") -> "Accepts":
        """Return a rule that accepts None as well; `description` describes None in the remedy."""

        def converted(value: Any) -> Any:
            if value is None:
                return None
            return self.converted(value)

        return Accepts(f"{self.description}; or {description}", converted)


def plain(value: Any) -> Any:
    """Return a scalar of numpy, torch or JAX as a number of Python, anything else as it is."""
    if getattr(value, "shape", None) == ():
        return value.item()
    return value


def whole(minimum: int | None = None, maximum: int = _MAX_WHOLE) -> Accepts:
    """Return a rule that accepts a whole number of any type, and converts it to an int.

    For example, it accepts the float 1e6, or an integer of numpy.

    Args:
        minimum: the smallest accepted number; None for any number.
        maximum: the greatest accepted number; without effect if `minimum` is None.
    """

    def converted(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        if isinstance(value, float) and value.is_integer():
            number = int(value)
        else:
            number = operator.index(value)
        if minimum is not None and not minimum <= number <= maximum:
            raise ValueError
        return number

    if minimum is None:
        return Accepts("a whole number", converted)
    limit = "" if maximum == _MAX_WHOLE else f" and at most {maximum:,}"
    return Accepts(f"a whole number, {minimum} or more{limit}", converted)


def one_of(*choices: object) -> Accepts:
    """Return a rule that accepts the choices, and values that are equal to one of them."""

    def converted(value: Any) -> Any:
        # The value may be equal to the choice, but have another type.
        return choices[choices.index(value)]

    names = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices]
    *first, last = names
    return Accepts(f"{', '.join(first)} or {last}", converted)


def instance(description: str, *types: Any) -> Accepts:
    """Return a rule that accepts instances of these types, and leaves them as they are."""

    def converted(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return Accepts(description, converted)


# Each of the following functions can be the `converted` of a rule.


def _flag(value: Any) -> bool:
    # True and False are integers in Python, equal to 1 and 0.
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError
    return bool(value)


def _positive(value: Any) -> float:
    number = float(value)  # accepts texts and booleans as well
    if isinstance(value, str | bool) or not number > 0:  # NaN is not above 0
        raise ValueError
    return number


def _seed(value: Any) -> int:
    number: int = whole().converted(value)
    if number.bit_length() > _SEED_BITS:
        raise ValueError
    return number


def _seconds(value: Any) -> float:
    seconds = _positive(value)
    if seconds > _MAX_TIMEOUT_S:
        raise ValueError
    return seconds


def _seconds_or_zero(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value == 0:
        return 0.0
    return _seconds(value)


def _urls(value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        return value
    # These types can be iterated, but their items are not urls, or have no order.
    if isinstance(value, Mapping | set | frozenset | bytes):
        raise TypeError
    urls = list(value)
    if not urls or not all(isinstance(url, str | os.PathLike) for url in urls):
        raise TypeError
    return urls


def _url(value: Any) -> Any:
    PATH.converted(value)
    os.fspath(value).encode()  # raises UnicodeEncodeError, a ValueError, unless it is UTF-8
    return value


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


def _whole_numbers(value: Any) -> list[int]:
    rule = whole()
    return [rule.converted(plain(number)) for number in value]


def _positive_numbers(value: Any) -> list[float]:
    return [_positive(plain(number)) for number in value]


def _job(value: Any) -> str:
    name: str = TEXT.converted(value)
    name.encode()  # raises UnicodeEncodeError, a ValueError, unless the name is UTF-8
    if not 0 < len(name) <= MAX_JOB_CHARS:
        raise ValueError
    return name


def flag(addition: str = "") -> Accepts:
    """Return a rule that accepts True, False, 1 and 0, and converts them to a bool.

    Args:
        addition: text that follows "True or False" in the remedy.
    """
    return Accepts(f"True or False{addition}", _flag)


SAMPLE_NUMBERS = Accepts("whole numbers of samples", _whole_numbers)
FUNCTION = instance("a function", Callable)
NAMES = Accepts("extensions of members", _names)
PATH = instance("a path", str, os.PathLike)
URL = Accepts("a url or a path, in UTF-8", _url)
DAEMONS = one_of("auto", "node", "private")
SECONDS = Accepts(f"a number of seconds above 0, at most {_MAX_TIMEOUT_S:,}", _seconds)
SECONDS_OR_ZERO = Accepts(
    f"a number of seconds; 0 for no limit, at most {_MAX_TIMEOUT_S:,}",
    _seconds_or_zero,
)
SEED = Accepts(f"a whole number of at most {_SEED_BITS} bits", _seed)
TEXT = instance("a string", str)
JOB = Accepts(f"a name of 1 to {MAX_JOB_CHARS} characters", _job)
SPLIT_RULES = {
    "fractions": Accepts("numbers above 0 whose sum is 1", _positive_numbers),
    "seed": SEED,
    "by": one_of("samples", "shards"),
}
"""Rules of the arguments of `split`, by the arguments' names."""
URLS = Accepts("a url, a path, or a list of them", _urls)


def by_name(pairs: Iterable[tuple[object, U]], argument: str) -> dict[str, U]:
    """Return values by their names. Names are converted to text: the number 1 becomes "1".

    Args:
        pairs: names and values.
        argument: noun for the argument, which begins the error's message.

    Raises ConfigError if two values have the same name.
    """
    values: dict[str, U] = {}
    for key, value in pairs:
        name = str(key)
        if name in values:
            raise ConfigError(
                f"{argument} has two entries named {name!r}",
                remedy="give each a name of its own, as text",
            )
        values[name] = value
    return values


def check_global_batches(
    size: int,
    *,
    batch_size: int,
    even: str | None,
    canonical_nodes: int,
) -> None:
    """Raise ConfigError if an epoch cannot be cut into global batches of `size` samples."""
    if batch_size != 1:
        raise ConfigError(
            f"batch_size is {batch_size} and global_batch_size is {size}",
            remedy="give global_batch_size alone: batch_size is then each rank's part of it",
        )
    if even is None:
        raise ConfigError(
            "global_batch_size needs the same number of samples on every rank",
            remedy='choose even="pad" or even="drop"',
        )
    if size % canonical_nodes:
        raise ConfigError(
            f"global_batch_size={size} cannot be divided among canonical_nodes={canonical_nodes}",
            remedy="make it a multiple of canonical_nodes",
        )


def checked(
    other_words: Mapping[str, str] = MappingProxyType({}),
    passed_on: Iterable[str] = (),
    refused: Iterable[str] = (),
    /,
    **rules: Accepts,
) -> Callable[[F], F]:
    """Check the arguments of a function at each call, and convert them.

    Args:
        other_words: names of arguments in other libraries, with a remedy for each, for the error
            about an unknown argument. "{}" in a remedy stands for the name.
        passed_on: names of the arguments that the function takes as `**options`. If it is empty,
            a function with `**options` takes arguments of all names.
        refused: names of arguments that the function takes only to raise an error about them. No
            remedy recommends them.
        rules: rules for the arguments' values, by the arguments' names; arguments without a rule
            are passed as they are.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds and not passed_on
        known = list(dict.fromkeys([*_names_of_arguments(signature), *passed_on]))
        recommended = [name for name in known if name not in refused]

        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            try:
                for name in named:
                    if name not in known and not takes_any:
                        raise _unknown_argument(name, recommended, other_words)
                bound = _bind(signature, args, named)
                _convert(bound.arguments, rules)
                # The arguments that the function takes as `**options` are in a dict of their own.
                _convert(bound.arguments.get("options", {}), rules)
                return function(*bound.args, **bound.kwargs)
            except ConfigError as exn:
                _prefix_with_call(exn, function, args)
                raise

        return call  # type: ignore[return-value]

    return decorate


def _names_of_arguments(signature: inspect.Signature) -> list[str]:
    """Return the names of a function's arguments, without `self`, `*args` and `**options`."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind not in variadic
    ]


def _convert(arguments: dict[str, Any], rules: Mapping[str, Accepts]) -> None:
    """Convert the arguments that have a rule, in place. Raises ConfigError."""
    for name in rules.keys() & arguments.keys():
        arguments[name] = converted_argument(name, arguments[name], rules[name])


def _bind(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> inspect.BoundArguments:
    """Return the arguments of a call by their names. Raises ConfigError if they do not fit."""
    try:
        return signature.bind(*args, **named)
    except TypeError as exn:
        raise ConfigError(str(exn), remedy="give each argument once, by its name") from None


def _unknown_argument(
    name: str,
    recommended: list[str],
    other_words: Mapping[str, str],
) -> ConfigError:
    """Return the error for an argument that does not exist.

    Args:
        name: name of the argument.
        recommended: names of the arguments that may be recommended instead.
        other_words: see `checked`.
    """
    # The argument, or the other library's argument, that was probably meant; "" if unknown.
    meant = ""
    similar_names = difflib.get_close_matches(name.lower(), [*recommended, *other_words], n=1)
    if name in other_words:
        meant = name
    elif similar_names:
        meant = similar_names[0]

    if meant not in recommended and meant in other_words:
        remedy = other_words[meant].format(meant)
    elif meant:
        remedy = f"write {meant}=..."
    else:
        remedy = f"its arguments are {', '.join(recommended)}"
    hint = f"; did you mean {meant!r}?" if meant not in ("", name) else ""
    return ConfigError(f"there is no argument {name!r}{hint}", remedy=remedy)


def converted_argument(name: str, value: Any, rule: Accepts) -> Any:
    """Return the value of an argument, converted by its rule. Raises ConfigError."""
    try:
        return rule.converted(plain(value))
    except (TypeError, ValueError, OverflowError):
        remedy = _remedy_without_quotes(name, value, rule) or f"give {rule.description}"
        raise ConfigError(f"{name} is {shown(value)}", remedy=remedy) from None


def shown(value: Any) -> str:
    """Return the text of a value for an error, cut short if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer has more digits than Python converts to text
        return "too large a number"
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return f"{text[:_MAX_SHOWN_CHARS]}…"


def _remedy_without_quotes(name: str, value: Any, rule: Accepts) -> str:
    """Return the remedy for a text whose literal value would be accepted, such as "8" for 8.

    Returns "" for any other value.
    """
    if not isinstance(value, str):
        return ""
    try:
        unquoted = rule.converted(literal_eval(value))
        return f"write {name}={unquoted!r}, without quotes"
    except (TypeError, ValueError, OverflowError, SyntaxError, RecursionError, MemoryError):
        return ""


def _prefix_with_call(
    exn: ConfigError, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Prefix an error with the class, method or function that the user called.

    If checked functions call each other, the message names the outermost function. An error with a
    url stays as it is.
    """
    if exn.url is not None:
        return
    *owner, method = function.__qualname__.split(".")[-2:]
    if not owner:
        called = f"{method}()"
    elif method == "__init__":
        called = type(args[0]).__name__
    else:
        called = f"{type(args[0]).__name__}.{method}()"
    # The original message is kept, so that an outer function's name replaces an inner function's.
    original = vars(exn).setdefault("original_message", exn.message)
    exn.message = f"{called}: {original}"
    exn.args = (exn.message,)
