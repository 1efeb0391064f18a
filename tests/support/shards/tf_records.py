"""TFRecord files, made without TensorFlow: Examples by Google's protobuf library, framed here."""

import struct
from collections.abc import Mapping
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

_EXAMPLE = """
syntax: "proto3" name: "example.proto" package: "tf"
message_type {
  name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT }
}
message_type {
  name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field {
    name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tf.BytesList" oneof_index: 0
  }
  field {
    name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tf.FloatList" oneof_index: 0
  }
  field {
    name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tf.Int64List" oneof_index: 0
  }
}
message_type {
  name: "Features"
  field {
    name: "feature" number: 1 label: LABEL_REPEATED
    type: TYPE_MESSAGE type_name: ".tf.Features.FeatureEntry"
  }
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field {
      name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".tf.Feature"
    }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tf.Features" }
}
"""


def _messages(*, is_packed: bool) -> Any:
    """Return the class tf.train.Example, with numbers packed, as TensorFlow does, or not."""
    file = text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto())
    for message in file.message_type:
        if message.name in ("FloatList", "Int64List"):
            message.field[0].options.packed = is_packed
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
    return bytes(made.SerializeToString())


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<L", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(*records: bytes) -> bytes:
    heads = [struct.pack("<Q", len(record)) for record in records]
    frames = [
        head + masked(head) + each + masked(each) for head, each in zip(heads, records, strict=True)
    ]
    return b"".join(frames)
