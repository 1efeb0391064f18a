"""Arguments of datasets, loaders and mixtures: what each accepts, the form in which it is kept, and other words for it.

Type arguments, too: `T_co` is what a dataset yields, `B_co` what a loader does.

`checked` wraps a function with the rules of its arguments. Every error is a ConfigError that names the class that was
called, the argument, what was given, and what to write instead.
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

from shardcache.errors import ConfigError
from shardcache.protocol import MAX_JOB_CHARS

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # defaults of type variables: PEP 696, in the standard library from 3.13 on

    T_co = TypeVar("T_co", covariant=True, default=dict[str, Any])
    B_co = TypeVar("B_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
    B_co = TypeVar("B_co", covariant=True)

U = TypeVar("U")
F = TypeVar("F", bound=Callable[..., Any])

_MAX_CHARS = 100
_MAX_WHOLE = 2**62  # states hold no larger number
MAX_PROCESSES = 2**20
MAX_BATCH = 2**31 - 1
MAX_WORKERS = 4_096
_MAX_TIMEOUT_S = 1_000_000  # the workers' pipes are polled with milliseconds of 31 bits
_BY_POSITION = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Accepts:
    """The values that an argument accepts: described as an object of "give", and converted to one form.

    `converted` raises TypeError or ValueError for any other value.
    """

    what: str
    converted: Callable[[Any], Any]

    def or_none(self, what: str = "None") -> "Accepts":
        """Accept None as well, which is `what`."""
        return Accepts(f"{self.what}; or {what}", lambda value: None if value is None else self.converted(value))


def plain(value: Any) -> Any:
    """Return a number of numpy's, torch's or JAX' as Python's, anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def whole(least: int | None = None, most: int = _MAX_WHOLE) -> Accepts:
    """Accept a whole number of any type, numpy's and 1e6 included, from `least` to `most`; kept as an int.

    Without `least`, any number, as for seeds.
    """

    def converted(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
        if least is not None and not least <= number <= most:
            raise ValueError
        return number

    if least is None:
        return Accepts("a whole number", converted)
    limit = "" if most == _MAX_WHOLE else f" and at most {most:,}"
    return Accepts(f"a whole number, {least} or more{limit}", converted)


def one_of(*choices: object) -> Accepts:
    """Accept any of the choices."""

    def converted(value: Any) -> Any:
        return choices[choices.index(value)]

    *first, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
    return Accepts(f"{', '.join(first)} or {last}", converted)


def by_name(pairs: Iterable[tuple[object, U]], what: str) -> dict[str, U]:
    """Return values by their names, which are texts: the number 1 is "1". Raises ConfigError if two have the same."""
    found: dict[str, U] = {}
    for key, value in pairs:
        name = str(key)
        if name in found:
            raise ConfigError(f"{what} has two entries named {name!r}", remedy="give each a name of its own, as text")
        found[name] = value
    return found


def instance(what: str, *kinds: Any) -> Accepts:
    """Accept instances of these types as they are."""

    def converted(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return Accepts(what, converted)


def _flag(value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError
    return bool(value)


def _positive(value: Any) -> float:
    number = float(value)
    if isinstance(value, str | bool) or not number > 0:
        raise ValueError
    return number


def _timeout(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value == 0:
        return 0.0
    seconds = _positive(value)
    if seconds > _MAX_TIMEOUT_S:
        raise ValueError
    return seconds


def _urls(value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        return value
    if isinstance(value, Mapping | set | frozenset | bytes):
        raise TypeError
    urls = list(value)
    if not urls or not all(isinstance(url, str | os.PathLike) for url in urls):
        raise TypeError
    return urls


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


def _job(value: Any) -> str:
    name: str = TEXT.converted(value)
    name.encode()
    if not 0 < len(name) <= MAX_JOB_CHARS:
        raise ValueError
    return name


def flag(what: str = "") -> Accepts:
    """Accept True and False, 1 and 0 included."""
    return Accepts(f"True or False{what}", _flag)


def _words(*rows: tuple[str, str]) -> dict[str, str]:
    return {word: remedy for words, remedy in rows for word in words.split()}


OTHER_WORDS = _words(
    ("drop_last", 'write even="drop", for ranks of equal length; of a loader: .loader(drop_last=True)'),
    (
        "num_workers workers pin_memory prefetch_factor persistent_workers collate_fn collate worker_init_fn in_order "
        "multiprocessing_context",
        "give it to the loader: .loader({}=...)",
    ),
    ("sampler batch_sampler", "give it to a DataLoader of .indexed(), which has samples by number"),
    ("generator random_seed shuffle_seed base_seed", "write seed=..."),
    ("transform transforms target_transform preprocess map map_fn", "write .map(function) after it"),
    ("filter filter_fn predicate", "write .filter(function) after it; or .select(), which uses the index"),
    (
        "shuffle_buffer shuffle_buffer_size buffer_size bufsize shuffle_size shuffle_block_size shuffle_algo initial "
        "shardshuffle shuffle_shards detshuffle",
        "write shuffle=True, shuffle_window=8, which mixes the samples of that many shards",
    ),
    ("num_canonical_nodes", "write canonical_nodes=..."),
    ("epoch_size epoch_length with_epoch length num_samples size", "write samples_per_epoch=..."),
    ("num_epochs n_epochs max_epochs repeat repeats", "write epochs=..."),
    ("epoch initial_epoch start_epoch", "call .set_epoch({})"),
    ("resampled", "write samples_per_epoch=..., and shuffle=True"),
    ("device_mesh dp_mesh process_group group dp_group", "write mesh=..."),
    ("num_replicas num_shards num_processes", "write world_size=..."),
    ("local_rank shard_id process_index process_id", "write rank=..., with world_size=..."),
    ("nodesplitter workersplitter splitter split_by_node split_by_worker", "omit it: ranks and workers have shares"),
    ("handler error_handler on_exception", "write on_error=..."),
    ("columns select_files fields features", 'write members=("jpg", "cls")'),
    ("image_decoder imagehandler decoder", "write decode=..."),
    ("remote local input_dir data_dir data_files path paths url shards root folder bucket", "write urls=..."),
    ("split subset subsample", "write .{}(...) after it; or name its shards in urls"),
    ("streams datasets proportion proportions probabilities weights", "write Mixture({{name: dataset}}, weights=...)"),
    ("item_loader block_size context_length seq_len", "write tokens=TokenBlocks(length)"),
    (
        "cache_dir cache_size cache_limit max_cache_size cache_url local_dir",
        "omit it: the daemon has the cache; shardcache serve --cache-dir DIR --capacity SIZE",
    ),
    (
        "predownload prefetch max_pre_download download_retry keep_zip keep_raw validate_hash verify streaming "
        "empty_check num_threads",
        "omit it: the daemon prefetches, retries and verifies",
    ),
    ("timeout download_timeout timeout_positive", "write timeout_s=...; of a loader: .loader(timeout=...)"),
    (
        "storage_options endpoint_url token profile credentials region anon s3_client fs filesystem",
        'write it into the daemon\'s config file: [[origin]], then match = "s3://bucket/" and the option',
    ),
)
"""Words of DataLoader, webdataset, MosaicML Streaming, LitData and datasets for what a dataset does otherwise."""

CHOSEN = Accepts("whole numbers of samples", lambda value: [whole().converted(plain(each)) for each in value])
FUNCTION = instance("a function", Callable)
NAMES = Accepts("extensions of members", _names)
PATH = instance("a path", str, os.PathLike)
DAEMONS = one_of("auto", "node", "private")
SECONDS = Accepts("a number of seconds above 0", _positive)
SECONDS_OR_ZERO = Accepts(f"a number of seconds; 0 for no limit, at most {_MAX_TIMEOUT_S:,}", _timeout)
TEXT = instance("a string", str)
JOB = Accepts(f"a name of 1 to {MAX_JOB_CHARS} characters", _job)
SPLIT = {
    "fractions": Accepts("numbers above 0 whose sum is 1", lambda value: [_positive(plain(each)) for each in value]),
    "seed": whole(),
    "by": one_of("samples", "shards"),
}
URLS = Accepts("a url, a path, or a list of them", _urls)


def checked(
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    also: Iterable[str] = (),
    unlisted: Iterable[str] = (),
    /,
    **rules: Accepts,
) -> Callable[[F], F]:
    """Check the arguments of a function at each call, and convert them.

    Args:
        elsewhere: other libraries' words, and the remedy of an error for each.
        also: names of further arguments, which the function passes on.
        unlisted: those of them that the function takes only in order to refuse; no error recommends them.
        rules: what each argument accepts; others are passed as they are.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
        known = [
            name for name, each in signature.parameters.items() if name != "self" and each.kind not in _BY_POSITION
        ]
        known += also
        listed = [name for name in known if name not in unlisted]

        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            try:
                if unknown := [name for name in named if name not in known and (also or not open_ended)]:
                    raise _unknown(unknown[0], listed, elsewhere)
                bound = _bound(signature, args, named)
                for arguments in (bound.arguments, bound.arguments.get("options", {})):
                    arguments |= {
                        name: converted(name, arguments[name], rules[name]) for name in rules.keys() & arguments.keys()
                    }
                return function(*bound.args, **bound.kwargs)
            except ConfigError as exn:
                _name(exn, function, args)
                raise

        return call  # type: ignore[return-value]

    return decorate


def check_global_batches(size: int, *, batch_size: int, even: str | None, canonical_nodes: int) -> None:
    """Raise ConfigError if an epoch cannot be cut into global batches of `size` samples."""
    if batch_size != 1:
        remedy = "give global_batch_size alone: batch_size is then each rank's part of it"
        raise ConfigError(f"batch_size is {batch_size} and global_batch_size is {size}", remedy=remedy)
    if even is None:
        raise ConfigError("global_batch_size needs ranks that are even", remedy='choose even="pad" or even="drop"')
    if size % canonical_nodes:
        raise ConfigError(
            f"global_batch_size={size} cannot be divided among canonical_nodes={canonical_nodes}",
            remedy="make it a multiple of canonical_nodes",
        )


def _bound(signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **named)
    except TypeError as exn:
        raise ConfigError(str(exn), remedy="give each argument once, by its name") from None


def _unknown(name: str, known: list[str], elsewhere: Mapping[str, str]) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), [*known, *elsewhere], n=1)
    word = name if name in elsewhere else near[0] if near else ""
    remedy = f"write {word}=..." if word else f"its arguments are {', '.join(known)}"
    if word not in known and word in elsewhere:
        remedy = elsewhere[word].format(word)
    hint = f"; did you mean {word!r}?" if word not in ("", name) else ""
    return ConfigError(f"there is no argument {name!r}{hint}", remedy=remedy)


def converted(name: str, value: Any, rule: Accepts) -> Any:
    """Return the value of an argument in the form in which it is kept. Raises ConfigError."""
    try:
        return rule.converted(plain(value))
    except (TypeError, ValueError, OverflowError):
        remedy = _unquoted(name, value, rule) or f"give {rule.what}"
        raise ConfigError(f"{name} is {_shown(value)}", remedy=remedy) from None


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return "too large a number"
    return shown if len(shown) <= _MAX_CHARS else f"{shown[:_MAX_CHARS]}…"


def _unquoted(name: str, value: Any, rule: Accepts) -> str:
    """Return a remedy for a literal that is accepted without its quotes; an empty string for anything else."""
    try:
        if not isinstance(value, str):
            return ""
        return f"write {name}={rule.converted(literal_eval(value))!r}, without quotes"
    except (TypeError, ValueError, OverflowError, SyntaxError, RecursionError, MemoryError):
        return ""


def _name(exn: ConfigError, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Let an error without a url begin with the class, method or function that the user called: the outermost one."""
    if exn.url is None:
        *owner, method = function.__qualname__.split(".")[-2:]
        called = type(args[0]).__name__ if owner else ""
        called += "" if method == "__init__" else f".{method}()" if owner else f"{method}()"
        exn.message = f"{called}: {vars(exn).setdefault('unnamed', exn.message)}"
        exn.args = (exn.message,)
