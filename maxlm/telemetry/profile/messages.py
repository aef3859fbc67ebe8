"""Protobuf messages of traces and compiled programs: the fields that are read of xplane.proto and hlo.proto (github.com/openxla/xla).

Text is declared as bytes, since protobuf refuses text that is no UTF-8, and a map as the messages of its entries.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "maxlm_trace"
_MESSAGES = {  # message -> "number name type" of its fields; []: repeated
    "XSpace": "1 planes []XPlane, 2 errors []bytes, 3 warnings []bytes",
    "XPlane": "2 name bytes, 3 lines []bytes, 4 event_metadata []EventEntry, 5 stat_metadata []StatEntry",
    "LineHead": "2 name bytes, 3 timestamp_ns int64, 4 events []bytes, 11 display_name bytes",
    "XLine": "4 events []XEvent",  # read one at a time, since its events take nine times their bytes
    "XEvent": "1 metadata_id int64, 2 offset_ps int64, 3 duration_ps int64, 4 stats []XStat",
    "XStat": "1 metadata_id int64, 3 uint64 uint64, 4 int64 int64, 5 str bytes, 6 bytes bytes, 7 ref uint64",
    "EventEntry": "1 key int64, 2 value EventMetadata",
    "EventMetadata": "2 name bytes, 4 display_name bytes, 5 stats []XStat",
    "StatEntry": "1 key int64, 2 value StatMetadata",
    "StatMetadata": "2 name bytes",
    "HloProto": "1 module HloModule",
    "HloModule": "1 name bytes, 3 computations []HloComputation",
    "HloComputation": "2 instructions []HloInstruction, 5 id int64",
    "HloInstruction": "1 name bytes, 2 opcode bytes, 7 metadata OpMetadata, 35 id int64, 36 operands []int64, 38 calls []int64",
    "OpMetadata": "2 op_name bytes",
}


def _classes() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="trace.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, label, kind in (text.split() for text in fields.split(", ")):
            made = message.field.add(name=label, number=int(number))
            made.label = field.LABEL_REPEATED if kind.startswith("[]") else field.LABEL_OPTIONAL
            kind = kind.removeprefix("[]")
            made.type = field.TYPE_MESSAGE if kind in _MESSAGES else field.Type.Value(f"TYPE_{kind.upper()}")
            if kind in _MESSAGES:
                made.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


_CLASSES = _classes()
XSpace, XLine, LineHead, HloProto = (_CLASSES[name] for name in ("XSpace", "XLine", "LineHead", "HloProto"))
