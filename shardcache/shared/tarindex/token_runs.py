"""Tokens of a shard: for each sample, the offset of its tokens in the tar, and their number.

Language-model training cuts the tokens of all documents, end to end, into blocks of equal size. For
that, one member of each sample holds an array of tokens: a `.npy` file, or a plain array of a type
that the user names. `find_tokens` finds the tokens of a whole shard for a reader; `tokens_in`
counts those of one sample as it is written.
"""

import re
from array import array
from dataclasses import dataclass

from shardcache.shared.exceptions import TokensError
from shardcache.shared.tarindex.named_members import DTYPES, TokenMember
from shardcache.shared.tarindex.tables import Tables, TarBytes, fault_of, key_of, member_spans

# A `.npy` file begins with a magic, two bytes of version, the length of the header, and the header,
# which is the text of a Python dict with sorted keys.
_MAGIC = b"\x93NUMPY"
_MAJOR_VERSION = slice(6, 7)
_LENGTH_START = 8
_LENGTH_END = 10  # the length has two bytes in version 1
_LATER_LENGTH_END = 12  # and four bytes in later versions
# Numbers of several bytes have to be little-endian, `<`; `|` stands for numbers of one byte. In one
# dimension, both values of `fortran_order` mean the same.
_HEADER = re.compile(
    rb"\{'descr': '[<|]([iu])([1248])', "
    rb"'fortran_order': (?:False|True), "
    rb"'shape': \(([0-9]+),\), ?\}\s*",
)
_KINDS = {b"u": "uint", b"i": "int"}
_MAX_HEADER_BYTES = 1024


def tokens_in(data: bytes, member: TokenMember, key: str) -> int:
    """Return the number of tokens in a sample's member.

    Raises TokensError for the same members as `find_tokens`.

    Args:
        data: content of the member.
        member: type of the tokens.
        key: key of the sample, for messages.
    """
    dtype, start = _find_array(data, 0, len(data), member, key, url=None)
    return _token_count(len(data) - start, dtype, key, url=None)


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """The tokens of each sample of a shard; a sample that lacks the member has no tokens.

    Attributes:
        dtype: type of the tokens, a key of `DTYPES`.
        tar_offsets: for each sample, the offset of its first token in the tar, in bytes.
        token_ends: for each sample, the number of tokens in it and all samples before it.
    """

    dtype: str
    tar_offsets: "array[int]"
    token_ends: "array[int]"

    @property
    def tokens(self) -> int:
        """Number of tokens in the shard."""
        return self.token_ends[-1] if self.token_ends else 0


def find_tokens(tables: Tables, tar: TarBytes, member: TokenMember, url: str) -> TokenRuns:
    """Return the tokens of a shard: those of each sample, end to end in the order of the tar.

    Only the headers of `.npy` files are read from the tar. Raises TokensError, with `url`, for an
    unusable sample, a member that is not an array of tokens with one dimension, or members of
    different types. Such samples are not skipped, since blocks cut from a shard without some of its
    tokens would be different blocks.

    Args:
        tables: the samples of the shard.
        tar: the bytes of the tar.
        member: the extension of the members with tokens, and the type of the tokens.
        url: url of the shard.
    """
    if tables.faults:
        first_unusable_sample = min(tables.faults)
        reason = fault_of(tables, first_unusable_sample)
        assert reason is not None
        raise _unsupported(reason, url)
    dtype = member.dtype
    tar_offsets = array("Q")
    token_ends = array("Q")
    total = 0
    for sample, (start, end) in enumerate(member_spans(tables, member.extension)):
        first_token = start
        if start < end:  # otherwise the sample lacks the member, or the member is empty
            key = key_of(tables, sample)
            sample_dtype, first_token = _find_array(tar, start, end, member, key, url)
            if dtype is not None and dtype != sample_dtype:
                raise _unsupported(
                    f"the sample {key!r} has {sample_dtype}, those before {dtype}", url
                )
            dtype = sample_dtype
            total += _token_count(end - first_token, dtype, key, url)
        tar_offsets.append(first_token)
        token_ends.append(total)
    if dtype is None:
        dtype = "uint8"  # any type will do for a shard without tokens
    return TokenRuns(dtype, tar_offsets, token_ends)


def _find_array(
    tar: TarBytes,
    start: int,
    end: int,
    member: TokenMember,
    key: str,
    url: str | None,
) -> tuple[str, int]:
    """Return type and offset of the array in a sample's member. Raises TokensError.

    Args:
        tar: the bytes of the tar.
        start: offset at which the member's content begins.
        end: offset at which it ends.
        member: type of the tokens.
        key: key of the sample, for messages.
        url: url of the shard, for messages; None for a shard that is being written.
    """
    if member.dtype is not None:
        return member.dtype, start
    # A .npy file states its type in a header.
    head = tar[start : min(end, start + _MAX_HEADER_BYTES)]
    return _npy_values(head, start, end, key, url)


def _token_count(size_bytes: int, dtype: str, key: str, url: str | None) -> int:
    """Return the number of tokens in some bytes.

    Raises TokensError if the bytes are not a whole number of tokens.
    """
    token_bytes = DTYPES[dtype]
    tokens, surplus_bytes = divmod(size_bytes, token_bytes)
    if surplus_bytes:
        reason = f"{size_bytes} bytes of tokens, which is not a multiple of {token_bytes}"
        raise _unsupported(f"the sample {key!r} has {reason}", url)
    return tokens


def _npy_values(head: bytes, start: int, end: int, key: str, url: str | None) -> tuple[str, int]:
    """Return type and offset of the values of a `.npy` file. Raises TokensError.

    Args:
        head: the first bytes of the file.
        start: offset in the tar at which the file begins.
        end: offset in the tar at which the file ends.
        key: key of the file's sample, for messages.
        url: url of the shard, for messages; None for a shard that is being written.
    """
    header_start = _LATER_LENGTH_END
    if head[_MAJOR_VERSION] == b"\1":
        header_start = _LENGTH_END
    header_end = header_start + int.from_bytes(head[_LENGTH_START:header_start], "little")
    match = _HEADER.fullmatch(head, header_start, min(header_end, len(head)))
    if not head.startswith(_MAGIC) or match is None:
        raise _unsupported(
            f"the sample {key!r} has a member that is not a .npy file of integers in one dimension",
            url,
        )
    kind = _KINDS[match[1]]
    item_bytes = int(match[2])
    count = int(match[3])
    values_bytes = end - start - header_end
    expected_bytes = count * item_bytes
    if values_bytes != expected_bytes:
        reason = f"{values_bytes} bytes of tokens instead of {expected_bytes}"
        raise _unsupported(f"the sample {key!r} has {reason}", url)
    return f"{kind}{8 * item_bytes}", start + header_end


def _unsupported(reason: str, url: str | None) -> TokensError:
    return TokensError(f"its tokens cannot be cut into blocks: {reason}", url=url)
