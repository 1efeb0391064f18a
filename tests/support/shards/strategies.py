"""Random tars for Hypothesis: what tars in the wild hold, and what they had better not."""

from __future__ import annotations

import tarfile

from hypothesis import strategies as st

from support.shards.tars import pack, special

Row = tuple[str, bytes, bytes]  # name, type, content

_FOLDERS = ["", "", "", "./", "d/", "d.ir/", ".h/", "é/", "__meta__/"]
_KEYS = ["a", "a", "b", "A", "ab", "é", "\udcff", "_", "__index__", ""]
_EXTENSIONS = ["jpg", "jpg", "JPG", "cls", "a.b", "é", "É", "İ", "ΟΣ", "\udcff", "__x__", "__key__", "__URL__", "", "/"]

# Few characters and few parts, so that dots, folders, hidden files, dunders and equal keys meet often.
names = (
    st.builds("{}{}.{}".format, st.sampled_from(_FOLDERS), st.sampled_from(_KEYS), st.sampled_from(_EXTENSIONS))
    | st.text("ab._/é\nJ", min_size=1, max_size=12)
    | st.sampled_from(["__meta__", "__index__.json", "a.jpg", "a.cls", "b.jpg", "x" * 300])
)
kinds = st.sampled_from([tarfile.REGTYPE] * 5 + [tarfile.AREGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
formats = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
members = st.lists(st.tuples(names, kinds, st.binary(max_size=600)), max_size=12)


def pack_rows(rows: list[Row], format_: int) -> bytes:
    """Pack random members; those whose names the format cannot hold are left out."""
    fits = [row for row in rows if format_ != tarfile.USTAR_FORMAT or len(row[0]) < 100]
    # A trailing slash makes a folder of an old-style file, and folders have no data.
    return pack(
        [(special(name, kind), b"" if name.endswith("/") else value) for name, kind, value in fits], format=format_
    )
