"""The part of a state's JSON object that describes the mixture that was read. Pure.

A mixture reads from several datasets, its sources.

- A section is an epoch that was not read to its end, because the mixture was changed.
- A phase is a part of an epoch that the same ranks have read.
- Each batch may be of a single source. Then a `SourceBatches` describes the form of the batches,
  and a turn is the samples that a source gives before another source may follow.

The members of the JSON object are:

- "sources": for each source by name, the number of its samples taken before the epoch ("start") and
  in the epoch ("samples").
- "mixed": the name and the identity of each source, in the order of the mixture. A checkpointer may
  sort the names in "sources", so their order means nothing.
- "batches": the fields of the `SourceBatches`, and the number of samples wanted in the epoch; left
  out if batches mix several sources.
- "changed": the latest change of the mixture, with the sections that have samples left; left out if
  there was none.

The order of samples depends on the latest change, and on seeds that were drawn: these are a
dataset's `Terms`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from shardcache_client.order.sequences.partition import Phase
from shardcache_client.order.sources.changes import (
    Change,
    EpochSource,
    KnownSource,
    MixtureState,
    Section,
)
from shardcache_client.order.sources.layouts import SourceBatches
from shardcache_client.position.progress import past_phase, phase_of
from shardcache_client.position.state_values import (
    checked_count,
    checked_flag,
    checked_integer,
    checked_numbers,
    checked_text,
)

_MAX_SPANS = 1 << 20  # maximum number of spans of an epoch that a state may name
_IDENTITY = re.compile(r"([0-9a-f]{8})?")  # empty in states of earlier releases


class Terms(NamedTuple):
    """Values that determine the order of samples, besides the dataset's arguments.

    States contain them, so that a run that resumes reads in the same order.

    Attributes:
        seeds: the seeds that were drawn at random, by name of the source. A dataset that is not a
            mixture has its seed under "".
        change: the latest change of a mixture; None if it was never changed.
    """

    seeds: Mapping[str, int] = {}
    change: Change | None = None

    @classmethod
    def of_state(cls, seeds: Mapping[str, int], mixture: MixtureState | None) -> Self:
        """Return the terms in a state, given its seeds and its mixture."""
        change = None if mixture is None else mixture.change
        return cls(seeds, change)


def mixture_to_json(mixture: MixtureState | None) -> dict[str, Any]:
    """Return the members of a state's JSON object that describe a mixture.

    There are none if `mixture` is None: the dataset is not a mixture.
    """
    if mixture is None:
        return {}
    sources = {
        name: {"start": source.start, "samples": source.samples}
        for name, source in mixture.epoch_sources.items()
    }
    data: dict[str, Any] = {"sources": sources}
    data["mixed"] = [[source.name, source.identity] for source in mixture.sources]
    if mixture.form is not None:
        data["batches"] = [*_form_to_json(mixture.form), mixture.total]
    if mixture.change is not None:
        data["changed"] = _change_to_json(mixture.change)
    return data


def _change_to_json(change: Change) -> dict[str, Any]:
    """Return a change as a JSON object that `_change_from_json` reads."""
    data: dict[str, Any] = {"epoch": change.epoch, "samples": change.samples}
    data["sources"] = [[source.name, source.identity, source.start] for source in change.sources]
    if change.sections:
        data["sections"] = [_section_to_json(section) for section in change.sections]
    return data


def _section_to_json(section: Section) -> dict[str, Any]:
    """Return a section as a JSON object that `_section_from_json` reads."""
    sources = [[source.name, source.start, source.samples] for source in section.sources]
    phases = [_phase_to_json(phase) for phase in section.phases]
    data: dict[str, Any] = {"sources": sources, "phases": phases}
    if section.form is not None:
        data["batches"] = _form_to_json(section.form)
    return data


def _form_to_json(form: SourceBatches) -> list[Any]:
    """Return the form of batches as a list that `_form_from_json` reads."""
    return [form.spans, form.size, form.alike]


def _phase_to_json(phase: Phase) -> list[Any]:
    """Return a phase as the fields of a `BatchPhase`, which `phase_of` reads."""
    # If all ranks have taken equally many samples, there is a single number, as in a `BatchPhase`.
    taken = phase.taken[0] if len(phase.taken) == 1 else list(phase.taken)
    # A `BatchPhase` counts batches, a `Phase` samples. So each sample is a batch here.
    batch_size = 1
    fields: list[Any] = [phase.partition.world_size, batch_size, taken]
    if phase.beyond:  # samples that were taken out of order
        fields.append(list(phase.beyond))
    return fields


def mixture_from_json(data: Mapping[str, Any]) -> MixtureState | None:
    """Return the mixture that a state describes; None if its dataset is not a mixture.

    Raises KeyError, TypeError, ValueError or AttributeError for an object that `mixture_to_json`
    does not return.
    """
    if "sources" not in data:
        return None
    numbers = {checked_text(name): checked_numbers(each) for name, each in data["sources"].items()}
    # States of earlier releases have neither the sources' identities nor their order.
    mixed = data.get("mixed", [[name, ""] for name in numbers])
    sources = tuple(
        KnownSource(checked_text(name), _checked_identity(identity), numbers[name]["start"])
        for name, identity in mixed
    )
    samples = tuple(numbers[source.name]["samples"] for source in sources)
    if "batches" in data:
        # The epoch consists of whole batches of one source each, so it may have a few samples more
        # or fewer than were wanted.
        *form_fields, wanted_samples = data["batches"]
        form = _form_from_json(form_fields)
        _check_turns(samples, form)
    else:
        form = None
        wanted_samples = sum(samples)
    change = _change_from_json(data["changed"]) if "changed" in data else None
    return MixtureState(sources, samples, form, checked_count(wanted_samples), change)


def _checked_identity(value: object) -> str:
    """Return the identity of a source. Raises TypeError or ValueError for anything else."""
    identity = checked_text(value)
    if not _IDENTITY.fullmatch(identity):
        raise ValueError("the identity of a source is not 8 hexadecimal digits")
    return identity


def _form_from_json(fields: Sequence[Any]) -> SourceBatches:
    """Return the form of batches that a state describes; see `SourceBatches` for its fields."""
    spans, size, alike = fields
    return SourceBatches(
        spans=checked_integer(spans, minimum=1, maximum=_MAX_SPANS),
        size=checked_count(size, minimum=1),
        alike=checked_flag(alike),
    )


def _check_turns(samples: Sequence[int], form: SourceBatches) -> None:
    """Raise ValueError unless the samples of every source make whole turns.

    Args:
        samples: number of samples of each source in the epoch.
        form: form of the epoch's batches.
    """
    if any(source_samples % form.samples_per_turn for source_samples in samples):
        raise ValueError("a source has a batch that is not whole")


def _change_from_json(data: Mapping[str, Any]) -> Change:
    """Return the change that a state describes. Raises as `mixture_from_json` does."""
    samples = data["samples"]
    sources = tuple(
        KnownSource(checked_text(name), _checked_identity(identity), checked_count(start))
        for name, identity, start in data["sources"]
    )
    return Change(
        checked_count(data["epoch"]),
        samples=None if samples is None else checked_count(samples),
        sources=sources,
        sections=tuple(map(_section_from_json, data.get("sections", ()))),
    )


def _section_from_json(data: Mapping[str, Any]) -> Section:
    """Return the section that a state describes. Raises as `mixture_from_json` does."""
    sources = tuple(
        EpochSource(checked_text(name), checked_count(start), checked_count(samples, minimum=1))
        for name, start, samples in data["sources"]
    )
    # The policy `even` is not saved. Which samples a phase has left does not depend on it, so any
    # value will do.
    phases = tuple(past_phase(phase_of(*fields), even=None) for fields in data["phases"])
    form = _form_from_json(data["batches"]) if "batches" in data else None
    if not sources or not phases:
        raise ValueError("a section has no sources or no phases")
    if form is not None:
        _check_turns([source.samples for source in sources], form)
    return Section(sources, form, phases)
