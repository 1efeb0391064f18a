"""Decoders by name, the choice of members, and what becomes of samples that lack one."""

import gzip
import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

from shardcache.errors import ConfigError, DecodeError, MissingMemberError
from shardcache_client.samples.decoders import decoder
from shardcache_client.samples.member_choice import Members
from shardcache_client.stages.map import Map
from shardcache_client.stages.pipeline import Pipeline


def picture(kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return a small image file with different values in each channel."""
    pixels = np.arange(12 * 8 * 3, dtype=np.uint8).reshape(12, 8, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def saved(save: Callable[[Any], None]) -> bytes:
    """Return the bytes that a function writes to a file."""
    file = io.BytesIO()
    save(file)
    return file.getvalue()


def sample(**members: Any) -> dict[str, Any]:
    """Return a sample with these members."""
    return {"__key__": "a", "__url__": "file:///s.tar", **members}


@pytest.mark.parametrize("name", sorted(wds.autodecode.imagespecs))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_are_decoded_as_webdataset_does(name: str, kind: str) -> None:
    """Each of its names gives the same type, shape and values."""
    data = picture(kind)
    theirs = wds.autodecode.imagehandler(name)(f"x.{kind.lower()}", data)
    ours = decoder(name)(data)
    assert type(ours) is type(theirs)
    if isinstance(ours, Image.Image):
        ours = np.asarray(ours)
        theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours, theirs)


def test_jpegs_have_the_same_pixels_with_and_without_simplejpeg(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The faster decoder is chosen where it is installed, and nothing else changes by it."""
    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    for subsampling in range(3):
        data = saved(
            lambda file, kind=subsampling: Image.fromarray(noise).save(
                file, "JPEG", subsampling=kind
            )
        )
        with monkeypatch.context() as without_pillow:
            without_pillow.setattr(Image, "open", None)
            fast = decoder("rgb8")(data)
        with monkeypatch.context() as without_simplejpeg:
            without_simplejpeg.setitem(sys.modules, "simplejpeg", None)
            slow = decoder("rgb8")(data)
        assert np.array_equal(fast, slow)


@pytest.mark.parametrize("mode", ["CMYK", "L"])
def test_jpegs_of_other_colors_become_rgb(mode: str) -> None:
    """A faster decoder that knows RGB alone does not change what comes out."""
    data = picture("JPEG", mode)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decoder("rgb8")(data), np.asarray(image.convert("RGB")))


def test_values_by_name_and_type() -> None:
    """Names and types give plain values; arrays come without pickle."""
    array = np.arange(6).reshape(2, 3)
    assert decoder(int)(b"7") == decoder("int")(b" 7\n") == 7
    assert decoder(float)(b"1.5") == 1.5
    assert decoder(str)("ä".encode()) == decoder("text")("ä".encode()) == "ä"
    assert decoder("json")(b'{"a": [1]}') == {"a": [1]}
    assert np.array_equal(decoder("numpy")(saved(lambda file: np.save(file, array))), array)
    assert np.array_equal(decoder("npz")(saved(lambda file: np.savez(file, x=array)))["x"], array)
    assert torch.equal(
        decoder("tensor")(saved(lambda file: torch.save(torch.ones(2), file))), torch.ones(2)
    )
    assert decoder("pickle")(pickle.dumps({1})) == {1}


@pytest.mark.parametrize("name", ["numpy", "npz", "tensor"])
def test_pickles_are_refused_by_default(name: str) -> None:
    """An array of objects, or a file of torch's with any object, is an error."""
    array = np.array([{1}], dtype=object)
    save = {
        "numpy": lambda file: np.save(file, array),
        "npz": lambda file: np.savez(file, x=array),
        "tensor": lambda file: torch.save(Members(["a"]), file),
    }
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        decoder(name)(saved(save[name]))


def test_an_unknown_name_is_refused_when_the_dataset_is_made() -> None:
    """With the nearest known name, and the member that it is for."""
    with pytest.raises(ConfigError, match="unknown decoder 'rbg8'; did you mean 'rgb8'") as caught:
        Pipeline.of({"jpg": "rbg8"}, None, "error")
    assert "decode['jpg']" in str(caught.value)
    with pytest.raises(
        ConfigError, match="'pill8', which is not an image decoder; did you mean 'pil"
    ):
        Pipeline.of("pill8", None, "error")
    with pytest.raises(ConfigError, match="'json', which is not an image decoder"):
        Pipeline.of("json", None, "error")
    with pytest.raises(ConfigError, match="is not a decoder"):
        Pipeline.of({"jpg": 3}, None, "error")  # type: ignore[dict-item]


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor of the dataset says so, not the first sample."""
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    with pytest.raises(ConfigError, match=r"decode\['mp4'\]: .* needs torchcodec"):
        Pipeline.of({"mp4": "video"}, None, "error")


def test_a_name_alone_decodes_by_extension() -> None:
    """Images are as named, others as in webdataset; the rest and pickles stay bytes."""
    pipeline = Pipeline.of("rgb8", None, "error")
    unpickled = pickle.dumps(1)
    members = {
        "seg.png": picture(),
        "cls": b"3",
        "json": b"[1]",
        "txt": b"x",
        "pyd": unpickled,
        "bin": b"\0",
    }
    found = pipeline(sample(**members))
    assert found.pop("seg.png").shape == (12, 8, 3)
    assert found == sample(cls=3, json=[1], txt="x", pyd=unpickled, bin=b"\0")


VALUES = {
    **dict.fromkeys(("txt", "text", "transcript"), "ä".encode()),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), b"7"),
    **dict.fromkeys(("json", "jsn"), b'{"a": [1]}'),
    **dict.fromkeys(
        ("ten", "tb"),
        wds.tenbin.encode_buffer([np.arange(6.0).reshape(2, 3), np.ones(3, np.uint8)]),
    ),
    "npy": saved(lambda file: np.save(file, np.arange(3))),
    "npz": saved(lambda file: np.savez(file, x=np.arange(3))),
    "bin": bytes(range(256)),
}
"""A member of each extension that webdataset decodes by itself, and an unknown one."""


def webdatasets(**members: bytes) -> dict[str, Any]:
    """Return what webdataset decodes members to by their extensions, keys in the tar's order."""
    decoded: dict[str, Any] = wds.autodecode.Decoder([wds.autodecode.imagehandler("rgb8")])(
        sample(**members)
    )
    return decoded


@pytest.mark.parametrize("compress", [None, gzip.compress])
@pytest.mark.parametrize("extension", VALUES)
def test_members_are_decoded_by_extension_as_webdataset_does(
    extension: str, compress: Callable[[bytes], bytes] | None
) -> None:
    """Prefixes and compression make no difference; unknown members are decompressed."""
    data = bytes(VALUES[extension])
    name = f"left.{extension}"
    if compress is not None:
        data = compress(data)
        name = f"{name}.gz"
    np.testing.assert_equal(
        Pipeline.of("rgb8", None, "error")(sample(**{name: data})), webdatasets(**{name: data})
    )


@pytest.mark.parametrize(
    "extension", ["class", "count", "msgpack", "messagepack", "tenbin", "pickle", "pkl", "pyd"]
)
def test_members_that_webdataset_leaves_or_unpickles_stay_bytes(extension: str) -> None:
    """Extensions that only look like those that are decoded, and those of pickles."""
    member = {extension: b"7"}
    if extension not in wds.autodecode.decoders:
        assert webdatasets(**member) == sample(**member)
    assert Pipeline.of("rgb8", None, "error")(sample(**member)) == sample(**member)


@pytest.mark.parametrize("kind", ["BMP", "ICO", "JPEG2000", "PCX", "TGA", "SGI", "DDS"])
def test_images_of_rarer_formats_are_decoded_by_extension(kind: str) -> None:
    """By each of the extensions that webdataset gives to its image decoder."""
    data = picture(kind)
    known = [extension for extension, each in Image.registered_extensions().items() if each == kind]
    for extension in sorted(
        {each.removeprefix(".") for each in known} & {*wds.autodecode.IMAGE_EXTENSIONS}
    ):
        ours = Pipeline.of("rgb8", None, "error")(sample(**{extension: data}))
        np.testing.assert_equal(ours, webdatasets(**{extension: data}))


def test_an_image_that_is_compressed_is_decoded() -> None:
    """The extension before `.gz` decides; `.gz` alone is only decompressed."""
    members = {"png.gz": gzip.compress(picture()), "gz": gzip.compress(b"x")}
    np.testing.assert_equal(
        Pipeline.of("rgb8", None, "error")(sample(**members)), webdatasets(**members)
    )


DAMAGED = {
    "plain": b"plain",
    "truncated gzip": gzip.compress(b"[1]" * 99)[:-9],
    "truncated tensor": bytes(VALUES["ten"][:120]),
    "truncated array": b"\x93NUMPY",
    "arrays in place of one": bytes(VALUES["npz"]),
}


@pytest.mark.parametrize("extension", ["json.gz", "bin.gz", "ten", "tb", "npy"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_members_are_errors_as_with_webdataset(extension: str, damage: str) -> None:
    """Named with the member, whatever the decoder raised."""
    with pytest.raises(wds.autodecode.DecodingError):
        webdatasets(**{extension: DAMAGED[damage]})
    with pytest.raises(DecodeError, match=f"the member '{extension}' of the sample 'a'"):
        Pipeline.of("rgb8", None, "error")(sample(**{extension: DAMAGED[damage]}))


def test_a_decoder_in_a_table_is_given_the_decompressed_member() -> None:
    """A named decoder gets it so; types and functions get the shard's bytes."""
    data = gzip.compress(b"[1]")
    for spec, value in (("json", [1]), ("text", "[1]"), (bytes, data), (gzip.decompress, b"[1]")):
        decode = Pipeline.of({"json.gz": spec}, None, "error")
        assert decode(sample(**{"json.gz": data}))["json.gz"] == value


@dataclass
class Scaled:
    """A decoder that cannot be hashed, as it has fields that may change."""

    factor: int

    def __call__(self, data: Any) -> int:
        """Return a multiple of a number."""
        return int(data) * self.factor


def test_a_decoder_need_not_be_hashable() -> None:
    """As an object of a dataclass is not."""
    assert Pipeline.of({"cls": Scaled(2)}, None, "error")(sample(cls=b"21"))["cls"] == 42


@pytest.mark.parametrize("members", [("json;json.gz",), ("json.gz;json",)])
@pytest.mark.parametrize("extension", ["json", "json.gz"])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_alternative_is_decoded_by_the_extension_that_the_sample_has(
    members: tuple[str, ...], extension: str, by_name: bool
) -> None:
    """The alternative's own name does not count, so compression may differ by sample."""
    name = members[0].partition(";")[0]
    data = gzip.compress(b"[1]") if extension == "json.gz" else b"[1]"
    decode = {name: "json"} if by_name else "rgb8"
    assert Pipeline.of(decode, members, "error")(sample(**{extension: data}))[name] == [1]


def test_a_tensor_of_a_gpu_is_loaded_into_memory() -> None:
    """As webdataset does: a machine without one can read it, and loader workers leave it alone."""
    file = io.BytesIO(saved(lambda file: torch.save(torch.arange(3), file)))
    moved = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(moved, "w") as changed:
        for each in archive.infolist():
            content = archive.read(each)
            changed.writestr(each, content.replace(b"\x03\0\0\0cpu", b"\x06\0\0\0cuda:0"))
    assert b"cuda:0" in moved.getvalue()
    found = Pipeline.of("rgb8", None, "error")(sample(pth=moved.getvalue()))
    assert torch.equal(found["pth"], torch.arange(3))


def test_an_array_of_ten_bytes_can_be_changed() -> None:
    """Like one of npy, it owns its memory."""
    (array, _) = decoder("tenbin")(VALUES["ten"])
    array += 1
    assert array.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_member_that_is_missing_is_an_error_that_names_it() -> None:
    """With the sample's key, its shard, and what it has."""
    pipeline = Pipeline.of({"cls": int}, ("jpg", "cls"), "error")
    with pytest.raises(
        MissingMemberError, match=r"the sample 'a' has no member 'cls' \(it has: jpg\)"
    ) as caught:
        pipeline(sample(jpg=b"1"))
    assert caught.value.url == "file:///s.tar"


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [
        ("jpg", "name 'png'; \"jpg;png\" takes either"),
        ("jpge", "did you mean 'png'"),
        ("jsn", "did you mean 'json'"),
        ("wav", "pass missing='skip'"),
    ],
)
def test_a_missing_member_is_compared_with_those_of_the_shard(wanted: str, remedy: str) -> None:
    """Also with those that `members` leaves out; the remedy names the one that was meant."""
    pipeline = Pipeline.of(None, (wanted, "cls"), "error")
    reads = pipeline.view(0).reads
    assert reads is not None
    assert [reads(extension) for extension in ("cls", "png", "json")] == [True, False, False]
    with pytest.raises(
        MissingMemberError, match=rf"no member '{wanted}' \(it has: cls; not read: json, png\)"
    ) as caught:
        pipeline(sample(cls=b"1"))
    assert caught.value.remedy.startswith(remedy)


def test_each_sample_has_its_own_default() -> None:
    """A change in place affects neither the next sample's nor the argument."""
    default: dict[str, list[int]] = {"boxes": []}
    pipeline = Pipeline.of(None, ("boxes",), default)
    one = pipeline(sample())
    other = pipeline(sample())
    one["boxes"].append(1)
    assert other["boxes"] == []
    assert default["boxes"] == []


def test_an_exception_names_sample_and_member() -> None:
    """A decoder's with the member."""
    with pytest.raises(
        DecodeError, match=r"the member 'cls' of the sample 'a' .*ValueError"
    ) as caught:
        Pipeline.of({"cls": int}, None, "error")(sample(cls=b"x"))
    assert caught.value.url == "file:///s.tar"


def test_a_pipeline_can_be_sent_to_a_spawned_worker() -> None:
    """As long as the user's own functions can."""
    pipeline = pickle.loads(
        pickle.dumps(
            Pipeline.of(
                {"jpg": "torch", "json": "json", "cls": int}, ("jpg;png", "json", "cls"), "skip"
            ).then(Map(json.dumps))
        )
    )
    assert pipeline.decode.members.names == ("jpg", "json", "cls")
    unpickled = pickle.loads(pickle.dumps(Pipeline.of("pil", None, "error")))
    assert unpickled(sample(cls=b"1"))["cls"] == 1
