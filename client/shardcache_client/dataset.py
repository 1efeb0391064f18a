"""`ShardDataset`, `Mixture` and `Joined`: tar shards as PyTorch datasets.

Each is a reader without torch (`ShardReader`, `MixtureReader`, `JoinedReader`) with the support for
torch added: an IterableDataset, and `loader()`. Users' documentation of all arguments is here.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset

from shardcache.shared.exceptions import ConfigError
from shardcache_client.arguments.values import (
    FUNCTION,
    MAX_BATCH,
    MAX_WORKERS,
    SECONDS_OR_ZERO,
    TEXT,
    Accepts,
    B_co,
    T_co,
    U,
    checked,
    flag,
    instance,
    one_of,
    whole,
)
from shardcache_client.joining import JoinedReader
from shardcache_client.loading.as_dataloader import ORDER_OPTIONS
from shardcache_client.loading.loader import ShardLoader
from shardcache_client.loading.torch_runtime import TorchRuntime
from shardcache_client.mixing import MixtureReader
from shardcache_client.parts.dataset_arguments import ARGUMENTS
from shardcache_client.parts.epoch_reader import EpochReader
from shardcache_client.reader import ShardReader
from shardcache_client.stages.pack import Block

# Remedies for arguments that belong to a dataset, but were given to its loader; "{}" stands for the
# argument.
_DATASET_REMEDIES = dict.fromkeys(ARGUMENTS, "give it to the dataset: ShardDataset(urls, {}=...)")
_DATALOADER_ARGUMENTS = [
    name for name in inspect.signature(DataLoader).parameters if name != "dataset"
]


def _converted_batch_size(value: Any) -> Any:
    """Return "dataset", None, or a whole number as an int. Raises TypeError or ValueError."""
    if value in ("dataset", None):
        return value
    return whole(1, MAX_BATCH).converted(value)


if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R")

    def _with_arguments_of(
        method: Callable[P, Any],
    ) -> Callable[[Callable[..., R]], Callable[P, R]]:
        """Return a decorator that gives a method the arguments of `method`, for type checkers."""


class ShardDataset(ShardReader[T_co], IterableDataset[T_co]):
    """A PyTorch dataset of tar shards, read from the disk cache that the node's daemon fills.

    Yields dicts: `__key__` and `__url__` (str), and the bytes of each member under its extension.
    An epoch is one sequence of samples, determined by the manifest (the list of shards with their
    numbers of samples), the seed and the epoch's number. Each rank takes a span of this sequence.
    The spans have equal numbers of samples, whatever the number of shards. The workers of a rank's
    DataLoader make its batches in turn.

    Without `set_epoch`, each iteration reads the next epoch; ranks that share a key-value store
    read the same epoch. A trainer process and the DataLoader workers that it starts share the
    current epoch and a loaded state.

    Args:
        urls: a brace pattern, glob, prefix ending in "/", index file (.json, wids format), local
            path, or a list of urls. A url that exists as it is written is not a glob; braces in a
            name are written `\\{` and `\\}`.
        shuffle: True: read shards and samples in a different order each epoch, determined by `seed`
            and the epoch alone. "global": permute all samples, for shards that are sorted. Each
            sample is then fetched by its range of bytes, ahead of need. This needs an index file
            with a table of samples (`shardcache index --samples`), uncompressed shards, and 12
            bytes of memory per sample in each process that reads.
        shuffle_window: with `shuffle=True`, number of shards whose samples are mixed; a rank holds
            that many shards, and no shuffle buffer. 0: only the order of the shards changes;
            samples come in file order. Default: 8.
        seed: seed of the shuffle; must be the same on all ranks. None: a random seed, which is
            logged, and kept in states so that a resumed run has the same order. Ranks agree on the
            random seed over torch.distributed's store, so torch.distributed must be initialised
            first.
        canonical_nodes: split the shards into this many fixed groups and shuffle within each group,
            so that on this many nodes each node mostly reads shards that it has already cached. 1:
            shuffle all shards together.
        even: "pad": every rank gets the same number of samples, and at most world_size - 1 samples
            come twice; "drop": at most world_size - 1 samples are left out; None: every sample
            comes once, so some ranks get one sample more.
        samples_per_epoch: samples per epoch over all ranks; the next epoch continues after them.
            Default: the whole dataset.
        epochs: number of epochs in the training run. Nothing is prefetched past the last epoch,
            number `epochs - 1`; later epochs can still be read. Default: no limit.
        batch_size: the DataLoader's batch size. States count in batches of this size, and ranks
            check that theirs is the same.
        global_batch_size: number of samples in the batches of all ranks together. These global
            batches are then the same, sample by sample, for any number of ranks that divides
            `global_batch_size`, and for any number of workers: a run may continue on other GPUs
            without a change to its training. The last global batch of an epoch is filled with the
            samples that come next (`even="pad"`) or left out (`"drop"`). Each global batch has
            equal parts from `canonical_nodes` spans of the epoch: set that argument to the number
            of nodes. Default: each rank has its own span.
        tokens: yield blocks of tokens as samples, in place of documents; see `TokenBlocks`. Needs
            an index with the numbers of tokens, made by `shardcache index --tokens`.
        decode: the name of a decoder for images, such as "rgb8", "torch" or "pil", with other
            members decoded by their extension as in webdataset (no member is unpickled); or a table
            such as `{"jpg": "rgb8", "cls": int}`, which leaves other members as bytes; or a
            function that takes a sample and returns the item to yield for it. An exception becomes
            a DecodeError.
            `help("shardcache_client.samples.decoders")` lists the names.
        members: extensions of the members to read, such as `("jpg;png", "cls")`, where "jpg;png"
            means the first of the two that a sample has, as "jpg". A pattern such as `"*.mp3"`
            means the member whose name ends in ".mp3", as "mp3", even if keys have dots. Default:
            all.
        missing: treatment of a sample without a member that `members` or the table of `decode`
            names: "error" raises a MissingMemberError; "skip" skips the sample, as `on_error`
            would; or a dict of values, of which the sample gets copies.
        key_split: the dot of a member's name at which its sample's key ends: "first-dot", as in
            webdataset, or "last-dot", as in WeNet, whose ids have dots. A shard that is read in
            both ways is cached twice. An index made with `--key-split last-dot` needs no argument.
        on_error: called with the error of a shard or sample; returns True to skip the shard or
            sample, False to end the epoch there, or raises an error. One of `handlers` can be given
            by its name, such as "warn_and_continue". Unless `even` is None, skipped samples are
            replaced by others of the epoch: ranks with unequal numbers would wait for each other
            indefinitely.
        job: name of this job in `shardcache status`. Default: the job's name in Slurm or Ray, else
            the name of the script.
        socket: path of the node's daemon's socket. Default: the same as for `shardcache serve`.
        rank, world_size: number of this process among the processes that share the samples, and
            their number. Default: from torch.distributed if it is initialised, else from torchrun's
            or Slurm's variables, else a single process. Determined when iteration begins.
        mesh: in place of rank and world_size, a DeviceMesh such as `mesh["dp"]`, or a ProcessGroup:
            the ranks among which samples are divided, row-major. Other ranks of the job, which hold
            other parts of the model, get the same samples and states.
        timeout_s: time limit for a wait for a shard of which nothing arrives, and for a wait for a
            lost daemon to come back.
        partial_reads: if the reader has to wait for a shard, yield the shard's samples as they
            arrive and are checked; for uncompressed tars, read in file order or by `indexed`. If
            the rest of the shard then fails, the error's `yielded` is the number of these samples.
            False: yield nothing until the whole shard has passed every check.
        daemon: "auto": the node's daemon if one was set up, or else a private daemon of this user,
            started if necessary; "node": only the node's daemon; "private": only a private daemon.
        fallback: what to do while the node's daemon does not answer or its disk fails. "error":
            raise an error. "private": read through a private daemon, with this process's own
            credentials, until the node's daemon works again.
        zero_copy: yield members of 4 KiB and more, or only those with these extensions, as
            read-only arrays (`sharing.buffer.Buffer`) over the mapped shard. The arrays convert and
            compare like bytes, and pass from a DataLoader worker to the training process without a
            copy. Needs numpy; turns partial reads off.

    Raises:
        NoDaemonError, DaemonError, VersionMismatchError: the daemon cannot be used.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: `urls` cannot be resolved.
        ConfigError: an argument is invalid; ranks hold parts of one model, and neither `mesh` nor
            `rank` is given; or, at the first sample, a wrapper shards the samples a second time.
        ManifestMismatchError, RanksError: another rank sees different shards, has other options
            (including another batch_size, unless `even` is None), or does not answer.
        EpochMismatchError: this rank repeatedly ends an epoch early while other ranks continue it.
    """

    _runtime = TorchRuntime()

    if TYPE_CHECKING:

        def map(self, function: Callable[[T_co], U]) -> "ShardDataset[U]":
            """See `ShardReader.map`."""

        @_with_arguments_of(ShardReader.pack)
        def pack(self, *args: Any, **options: Any) -> "ShardDataset[Block[T_co]]":
            """See `ShardReader.pack`."""

    def state_dict(self) -> dict[str, Any]:
        """Return this reader's position: a few numbers, whatever the size of dataset and batches.

        The position follows the last sample taken from the iterator in this process; this is how a
        StatefulDataLoader asks its workers. Workers of a plain DataLoader run ahead of the training
        loop: use `loader()`.

        A state taken after an epoch's last sample resumes with the next epoch, unless other ranks
        have one sample more or fewer (`even=None`): then load their states along with it.

        Raises ConfigError if a plain DataLoader's workers read the samples.
        """
        return super().state_dict()

    @checked(
        _DATASET_REMEDIES,  # for unknown arguments
        _DATALOADER_ARGUMENTS,  # names that `**options` may have
        ORDER_OPTIONS,  # names among them that are refused
        batch_size=Accepts(
            "a whole number, 1 or more; or None for samples one by one", _converted_batch_size
        ),
        num_workers=whole(0, MAX_WORKERS).or_none("None for a share of the CPUs"),
        workers=one_of("processes", "threads", "auto"),
        collate_fn=FUNCTION.or_none(),
        pin_memory=flag().or_none(),
        pin_memory_device=TEXT,
        persistent_workers=flag().or_none(),
        drop_last=flag(),
        prefetch_factor=whole(1, MAX_BATCH).or_none(),
        in_order=flag(),
        timeout=SECONDS_OR_ZERO,
        worker_init_fn=FUNCTION.or_none(),
        generator=instance("a torch.Generator", Generator).or_none(),
    )
    def loader(
        self,
        *,
        batch_size: int | Literal["dataset"] | None = "dataset",
        num_workers: int | None = None,
        workers: Literal["processes", "threads", "auto"] = "processes",
        collate_fn: Callable[[Any], B_co] | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        **options: Any,
    ) -> ShardLoader[B_co]:
        """Return a loader of this dataset's batches, which has an epoch, a length and a state::

            loader = dataset.loader(batch_size=256, num_workers=8)
            for epoch in range(loader.epoch, 90):
                done = len(loader) - loader.remaining
                for batch in tqdm(loader, initial=done, total=len(loader)):
                    ...  # torch.save(loader.state_dict(), ...) at any batch

        The loader begins where the dataset would, and then counts its own epochs. A `set_epoch` or
        `load_state_dict` of the dataset holds for its loaders, too.

        Args:
            batch_size: samples per batch; None for samples one by one. Default: the dataset's
                batch_size. For blocks of `pack`, the number of blocks in a list; default: None.
            num_workers: number of workers. Default: this process's share of the CPUs, 8 at most.
            workers: "processes"; or "threads", for decoders that release Python's global lock for
                most of their time, such as decoders of images: nothing is then copied or pickled
                between processes; or "auto": processes for the first batches, and threads for the
                others if functions and training hold that lock for little of their time. The
                batches are the same, except for numbers that functions draw at random.
            collate_fn: makes a batch of a list of samples. Default: torch's `default_collate`.
            pin_memory: default: True if there is a CUDA device.
            persistent_workers: default: True if there are workers.
            options: further arguments of `torch.utils.data.DataLoader`, such as `drop_last`,
                `prefetch_factor` or `multiprocessing_context`; but not `in_order=False`.

        Raises ConfigError if the batch_size contradicts the dataset's `global_batch_size`, or for
        an option by which a DataLoader would change the dataset's order.
        """
        if not options.get("in_order", True):
            raise ConfigError(
                "with in_order=False, batches would differ from run to run, and "
                "states would not say which were taken",
                remedy="omit it; to even out the time that batches take, have more of them "
                "made ahead: prefetch_factor=",
            )
        if batch_size == "dataset":
            # A dataset's batch_size counts samples, and not the groups of them that a stage yields.
            batch_size = self.batch_size if self.parts.stage is None else None
        reader = self._reader_in_batches_of(batch_size)
        options |= {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "workers": workers,
            "pin_memory": pin_memory,
            "persistent_workers": persistent_workers,
        }
        return ShardLoader(self, reader, collate_fn, options)

    def _reader_in_batches_of(self, batch_size: int | None) -> EpochReader:
        """Return a reader for a loader's batches, with a separate position.

        Args:
            batch_size: the loader's; None if it yields samples, or groups of a stage, one by one.
                States then count batches of the dataset's own size.
        """
        size = self.batch_size if batch_size is None else batch_size
        samples = self.parts.samples
        if not self.parts.fixes_batch_size:
            samples = samples.in_batches_of(size)
        elif size != self.batch_size:
            kind = "part of a global batch" if self.has_global_batches else "batch of one source"
            raise ConfigError(
                f"the loader's batch_size is {size}, each rank's {kind} {self.batch_size}",
                remedy="omit it; another size of batches needs another dataset",
            )
        # Ranks match their loaders by this name.
        name = str(size)
        return self.epoch_reader.derived(name, samples=samples)


class Mixture(MixtureReader[T_co], ShardDataset[T_co]):
    """A PyTorch dataset that mixes the samples of several datasets in proportion to their weights.

        web = ShardDataset("s3://bucket/web/index.json", shuffle=True, batch_size=64)
        code = ShardDataset("s3://bucket/code/index.json", shuffle=True, batch_size=64)
        mixture = Mixture({"web": web, "code": code}, weights={"web": 0.8, "code": 0.2})

    Use a mixture like a `ShardDataset`: with a DataLoader of any number of workers, on any number
    of ranks, with `set_epoch`, `len`, `state_dict` and `load_state_dict`. A sample has the name of
    its source as `__source__`.

    Over any number of epochs, each source has the number of samples that its weight demands. The
    error is at most half a sample with two sources, one sample with up to four sources, and one and
    a half samples if the weights change; `samples_of(epoch)` returns the numbers. An epoch spreads
    the samples of a source evenly: among any consecutive samples of a reader, such as a batch, a
    source has its proportion, with an error of at most one sample if there are two sources, and
    below four samples if there are more. Errors add up: one sample more if `even="pad"` repeats a
    rank's last sample, and as many samples as were skipped and replaced. A reader that resumes on
    another number of ranks or workers takes over the rest of several readers, with the error of
    each. With `global_batch_size`, only the samples of one batch are consecutive, and each of its
    `canonical_nodes` parts has its own error.

    Each source keeps its own order and its own `shuffle_window`, and is read in rounds: a round has
    each of its samples once, and a shuffled source has another order in each round. An epoch may
    take several rounds of a source, or part of one; the next epoch continues after it. The daemon
    gets one plan for all sources.

    A state has, under "sources", two numbers for each source: the place in the sequence of its
    rounds at which the epoch starts ("start"), and the number of its samples in the epoch
    ("samples").

    A state may be loaded into a mixture of other weights, `samples_per_epoch`, `batches` or
    sources, even in the middle of an epoch. The new arguments hold from the next batch on: the rest
    of the epoch has the new proportions, and each source continues exactly where it was. A source
    that was left out for a time continues as well, once it comes back; a new source begins at its
    beginning. A source that is in the state must be the same dataset with the same order, and the
    mixture must have at least one such source; `global_batch_size` cannot change. If the mixture is
    filtered or packed, or if `even=None` and a rank has ended, load the states of all ranks. Load
    the state of a StatefulDataLoader into the mixture itself, before the loader is made. The log
    says that the mixture has changed.

    Args:
        sources: datasets by name, or a list of datasets, whose names are then their numbers. Their
            samples must be counted, as `shardcache index` does. Each source keeps its urls,
            `shuffle`, `shuffle_window`, `seed`, `canonical_nodes`, `decode`, `members` and
            `missing`, and the functions that `map` and `filter` have added. All other options must
            be the same for all sources, and become the mixture's own.
        weights: a weight for each source, by name or in their order; only the ratios count. To
            change weights between epochs, give weights by the epoch from which they hold: `{0:
            {"web": 9, "code": 1}, 5: {"web": 1, "code": 1}}`. Default: the sizes of the sources, so
            that an epoch has each sample of each source once.
        samples_per_epoch: samples per epoch over all ranks. Default: as many as all sources
            together have.
        batches: "mixed": batches have samples of all sources. "source": each batch has samples of
            one source, the same source on all ranks at each step, chosen by weight; with
            `global_batch_size`, each global batch has samples of one source. "rank-source": each
            rank has its own sequence of sources. Batches of one source are whole, and have the
            `batch_size` of the sources; loaders must have it, too. An epoch is rounded to whole
            steps of all ranks, up (`even="pad"`) or down ("drop"), and the samples that a source
            has beyond its last batch come first in the next epoch.

    Raises ConfigError if an argument is invalid, the sources' options differ, or the samples of a
    source are not counted.
    """

    if TYPE_CHECKING:

        def map(self, function: Callable[[T_co], U]) -> "Mixture[U]":
            """See `ShardReader.map`."""


class Joined(JoinedReader[T_co], ShardDataset[T_co]):
    """A PyTorch dataset whose samples have members in other tars, joined by key.

    Such as captions, latents or new labels::

        images = ShardDataset("s3://bucket/img-{000..999}.tar", shuffle=True, batch_size=64)
        captions = ShardDataset("s3://bucket/cap-{000..999}.tar")
        dataset = Joined({"": images, "cap": captions}, decode="torchrgb8")  # "jpg", "cap.txt"

    The dataset has the samples of the first source, in the first source's order, with its options
    and epochs, and resumes from its states: a run may continue with other sources after the first.
    Each sample gets the members of the other sources' samples with the same key, as if they were in
    its tar; their extensions get the source's prefix and a dot. Two members of one name are an
    error. The order inside shards may differ. Samples whose keys the first source does not have are
    not read.

    Keys decide which samples belong together, whatever shards they are in. The tables of samples
    next to the index files hold the keys (`shardcache index --samples`). While the tables are read,
    they take about 40 bytes of memory per key if the nth shards have the same keys, otherwise about
    200. Shards without tables are paired by their place, the nth with the nth, and a sample whose
    key is not in the paired shard is an error. The daemon's plan names the shards of all sources
    together; a reader holds `shuffle_window` shards of each source.

    A source after the first may also be a `Table`, whose rows give samples further members.

    Args:
        sources: datasets by prefix. The first has all options; its prefix may be "", so that its
            members keep their names. The others are Tables, or datasets with the same daemon and
            `zero_copy`; their further options have no effect.
        decode, members: as in `ShardDataset`, by joined names: `{"jpg": "rgb8", "cap.txt":
            "text"}`. If `members` names none of a later source's members, nothing of that source is
            fetched.
        missing: as in `ShardDataset`. It also applies to a sample whose key another source does not
            have, or whose key comes repeatedly in either source; the error is then an
            UnmatchedKeyError. Any value but "error" needs the tables, and so do keys that come
            again in another shard. `shardcache status` counts the samples without a partner.

    Raises ConfigError if an argument is invalid, sources do not fit, or the tables are needed and
    missing.
    """
