"""TFRecord files, made without TensorFlow: Examples by Google's protobuf library, framed here."""

import struct
from collections.abc import Mapping
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def _messages(*, is_packed: bool) -> Any:
    """Return the class of tf.train.Example, made from its definition."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    types = {"BytesList": field.TYPE_BYTES, "FloatList": field.TYPE_FLOAT, "Int64List": field.TYPE_INT64}
    for name, kind in types.items():
        message = file.message_type.add(name=name)
        values = message.field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
        if kind != field.TYPE_BYTES:
            values.options.packed = is_packed
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), 1):
        inner = f".tf.{name.title().replace('_', '')}"
        feature.field.add(
            name=name,
            number=number,
            type=field.TYPE_MESSAGE,
            type_name=inner,
            label=field.LABEL_OPTIONAL,
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, type_name=".tf.Feature", label=field.LABEL_OPTIONAL
    )
    features.field.add(
        name="feature",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".tf.Features.FeatureEntry",
        label=field.LABEL_REPEATED,
    )
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features", number=1, type=field.TYPE_MESSAGE, type_name=".tf.Features", label=field.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


PACKED = _messages(is_packed=True)
NOT_PACKED = _messages(is_packed=False)


def example(features: Mapping[str, tuple[str, list[Any]]], message: Any = PACKED) -> bytes:
    made = message()
    made.features.SetInParent()
    for name, (kind, values) in features.items():
        feature = made.features.feature[name]
        getattr(feature, kind).SetInParent()
        getattr(feature, kind).value.extend(values)
    encoded: bytes = made.SerializeToString()
    return encoded


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<L", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(*records: bytes) -> bytes:
    heads = [struct.pack("<Q", len(record)) for record in records]
    frames = [head + masked(head) + each + masked(each) for head, each in zip(heads, records, strict=True)]
    return b"".join(frames)
