"""Protobuf message classes built at import time from a compact table.

Only the parts of the XLA wire format which HLO graphs from the scribe need
are declared.  Field numbers follow the public XLA format, so the bytes can be
parsed by XLA itself; the package name is private to avoid clashes with other
libraries that register the full schema in the same process.
"""

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import builder

_SCALARS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, "TYPE_" + name.upper())
    for name in ("int32", "int64", "uint32", "uint64", "float", "double", "bool", "string", "bytes")
}
_F = descriptor_pb2.FieldDescriptorProto


def _add_field(message, package, text, enums):
    """`name=number type`, type being `int64`, `*int64` (repeated), a message,
    an enum, or `map:K,V`."""
    name_number, kind = text.split()
    name, number = name_number.split("=")
    field = message.field.add(name=name, number=int(number), label=_F.LABEL_OPTIONAL)
    if kind.startswith("map:"):
        key, value = kind[4:].split(",")
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, package, f"key=1 {key}", enums)
        _add_field(entry, package, f"value=2 {value}", enums)
        field.label = _F.LABEL_REPEATED
        field.type = _F.TYPE_MESSAGE
        field.type_name = f".{package}.{message.name}.{entry_name}"
        return
    if kind.startswith("*"):
        field.label = _F.LABEL_REPEATED
        kind = kind[1:]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _F.TYPE_ENUM if kind.split(".")[-1] in enums else _F.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"


def build(file_name, package, enums, messages, module_name, namespace, imports=(), known_enums=(), nested_enums=None):
    """Declare the messages and put their classes into `namespace`."""
    nested_enums = nested_enums or {}
    all_enums = set(enums) | set(known_enums)
    for inner in nested_enums.values():
        all_enums |= set(inner)
    proto = descriptor_pb2.FileDescriptorProto(name=file_name, package=package, syntax="proto3")
    proto.dependency.extend(imports)

    def declare(target, table):
        for enum_name, values in table.items():
            enum = target.enum_type.add(name=enum_name)
            for value_name, number in values:
                enum.value.add(name=value_name, number=number)

    declare(proto, enums)
    for message_name, fields in messages.items():
        message = proto.message_type.add(name=message_name)
        declare(message, nested_enums.get(message_name, {}))
        for text in filter(None, (part.strip() for part in fields.split(";"))):
            _add_field(message, package, text, all_enums)

    descriptor = descriptor_pool.Default().AddSerializedFile(proto.SerializeToString())
    namespace["DESCRIPTOR"] = descriptor
    builder.BuildMessageAndEnumDescriptors(descriptor, namespace)
    builder.BuildTopDescriptorsAndMessages(descriptor, module_name, namespace)
