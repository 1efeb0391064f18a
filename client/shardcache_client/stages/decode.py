"""The stage of `decode`, `members` and `missing`: chooses and decodes a sample's members.

A member is one file of a sample in a shard; its extension is its name in the sample. These three
arguments of a dataset say which members are read, how each is decoded, and what happens if one is
missing.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

from shardcache.shared.exceptions import ConfigError, DecodeError, MissingMemberError
from shardcache_client.samples.decoders import (
    Decoder,
    DecoderChoice,
    Spec,
    choice_by_extension,
    choice_by_table,
)
from shardcache_client.samples.member_choice import Members
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.slicing import Sample
from shardcache_client.samples.token_blocks import TokenBlocks
from shardcache_client.stages.item_stage import SILENT_ENDS, Dropped

Missing = Literal["error", "skip"] | Mapping[str, Any]


@dataclass(frozen=True)
class Decode:
    """Chooses, checks and decodes the members of each sample; see `ItemStage`.

    Attributes:
        required: names of the members that each sample must have.
        missing: treatment of a sample that lacks a required member: raise, skip the sample, or take
            the member's value from this mapping.
        decoder_of: returns the decoder of a member; None to leave all members as they are.
        decoded_types: types of the values that are decoded; None for all types. Decoders that are
            chosen by extension decode bytes alone: a number or text that a format stores stays as
            it is, whatever the column's name.
        members: the members to read; None for all.
        blocks: form of the blocks of tokens that are the samples; None for the shards' own samples.
        prefix: prefix of the members of a joined dataset's first source; "" without a join.
        url_of: returns the url of the shard that a member came from, for errors; see
            `Manifest.url_of`. None to use the url of the sample's own shard.
    """

    required: tuple[str, ...] = ()
    missing: Missing = "error"
    decoder_of: DecoderChoice | None = None
    decoded_types: tuple[type, ...] | None = None
    members: Members | None = None
    blocks: TokenBlocks | None = None
    prefix: str = ""
    url_of: Callable[[str, str], str] | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        decode: Mapping[str, Spec] | str | None,
        members: Iterable[str] | None,
        missing: Missing,
        blocks: TokenBlocks | None = None,
    ) -> Self:
        """Build from the arguments of a dataset. Raises ConfigError if they are invalid."""
        has_member_options = decode is not None or members is not None or missing != "error"
        if blocks is not None and has_member_options:
            raise ConfigError(
                "blocks of tokens have no members to choose or decode by name",
                remedy="omit members and missing; pass a function as decode",
            )
        selected = _members_of(members)
        required = () if selected is None else selected.names

        decoder_of: DecoderChoice | None = None
        decoded_types: tuple[type, ...] | None = None
        if isinstance(decode, str):
            decoder_of = choice_by_extension(decode)
            decoded_types = _types_of_bytes()
        elif decode is not None:
            decoder_of = choice_by_table(decode)
            # Members that the table does not name are read as well.
            decoded = Members(decode, reads_others=True)
            if selected is None:
                selected = decoded
                required = decoded.names
            else:
                _check_none_left_out(decoded, required)

        if isinstance(missing, Mapping):
            _check_defaults(missing, required)
        return cls(required, missing, decoder_of, decoded_types, selected, blocks)

    @cached_property
    def is_needed(self) -> bool:
        """True if this stage does anything with samples."""
        return bool(self.required or self.decoder_of)

    @property
    def leaves_out(self) -> bool:
        """True if samples that lack a member are left out."""
        return self.missing == "skip"

    def view(self, joined_prefix: str | None = None) -> View:
        """Return the form in which samples are read.

        Args:
            joined_prefix: prefix of another source that is joined with this one. The result is then
                the form in which that source's samples are read. None for this stage's own samples.
        """
        prefix = self.prefix if joined_prefix is None else joined_prefix
        reads = None if self.members is None else self.members.reads
        decodes = None if self.decoder_of is None else self._decodes
        return View(
            reads=reads,
            blocks=self.blocks,
            prefix=prefix,
            decodes=decodes,
            keeps_values=self.decoded_types is not None,
            unmatched=self._unmatched_policy(prefix),
        )

    def _decodes(self, extension: str) -> bool:
        """Return True if this stage decodes the members with an extension."""
        if self.decoder_of is None:
            return False
        name_in_sample = extension
        if self.members is not None:
            name_in_sample = self.members.name_of(extension)
        return self.decoder_of(name_in_sample, extension) is not None

    def _unmatched_policy(self, prefix: str) -> Literal["error", "skip", "fill"]:
        """Return the treatment of samples without a partner in a joined source.

        Args:
            prefix: prefix of the source's members.
        """
        if isinstance(self.missing, str):
            return self.missing
        if any(name.startswith(prefix) for name in self.missing):
            return "fill"
        return "error"

    def apply(self, sample: Sample) -> Sample | Dropped:
        """Return a sample with its members decoded, or a `Dropped` if it is left out.

        Raises MissingMemberError, and DecodeError with the member's name.
        """
        # Extensions of the members that have another name in the sample, by that name.
        extensions: Mapping[str, str] = {}
        if self.members is not None:
            sample, extensions = self.members.choose(sample)

        absent = self._absent_members(sample) if self.required else ()
        if absent and self.missing == "skip":
            return Dropped.INCOMPLETE

        defaults = self.missing if isinstance(self.missing, Mapping) else {}
        for name in absent:
            if name not in defaults:
                unread: Iterable[str] = self.members.unread if self.members else ()
                raise MissingMemberError.of(name, sample, unread)

        if self.decoder_of is not None:
            for name in sample:
                # Names such as `__key__` are not members.
                if name.startswith("__") or not self._is_decodable(sample[name]):
                    continue
                decoder = self.decoder_of(name, extensions.get(name, name))
                if decoder is not None:
                    self._decode_member(sample, name, decoder)

        # Default values are added after decoding, because they are not decoded.
        for name in absent:
            sample[name] = deepcopy(defaults[name])
        return sample

    def _absent_members(self, sample: Sample) -> list[str]:
        """Return the names of the required members that a sample lacks."""
        absent = [name for name in self.required if name not in sample]
        if not absent:
            return absent
        # Required names are in lower case, but columns of some formats have capital letters in
        # their names.
        lowered_names = {name.lower() for name in sample}
        return [name for name in absent if name not in lowered_names]

    def _is_decodable(self, value: Any) -> bool:
        """Return True if a value has a type that is decoded."""
        return self.decoded_types is None or isinstance(value, self.decoded_types)

    def _decode_member(self, sample: Sample, name: str, decoder: Decoder) -> None:
        """Replace a member's bytes by its value. Raises DecodeError."""
        try:
            sample[name] = decoder(sample[name])
        except (Exception, *SILENT_ENDS) as exn:
            # In a join, members come from several shards: the error names the member's own shard.
            url = sample.get("__url__")
            if self.url_of is not None:
                url = self.url_of(sample["__url__"], name)
            raise DecodeError(
                f"the member {name!r} of the sample {sample.get('__key__')!r} could not be "
                f"decoded ({type(exn).__name__}: {exn})",
                url=url,
                remedy="fix the member or its decoder",
            ) from exn


def _types_of_bytes() -> tuple[type, ...]:
    """Return the types of members whose values are their bytes."""
    # This is imported on demand, because a Buffer is a numpy array.
    from shardcache_client.sharing.buffer import Buffer

    return bytes, Buffer


def _members_of(members: Iterable[str] | None) -> Members | None:
    """Return the choice that the argument `members` describes; None for all members."""
    if members is None:
        return None
    if isinstance(members, str):
        return Members([members])
    return Members(members)


def _check_none_left_out(decoded: Members, required: Iterable[str]) -> None:
    """Raise ConfigError if `decode` names a member that `members` leaves out."""
    left_out = set(decoded.names) - set(required)
    if left_out:
        raise ConfigError(f"decode names the member {min(left_out)!r}, which members leaves out")


def _check_defaults(missing: Mapping[str, Any], required: Iterable[str]) -> None:
    """Raise ConfigError for a default value of a member that is not required."""
    unknown = set(missing) - set(required)
    if unknown:
        raise ConfigError(
            f"missing has a value for {min(unknown)!r}, which neither members nor decode names",
            remedy="name it in members, too",
        )
