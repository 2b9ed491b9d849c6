"""A small builder of HLO graphs.

`HloScribe(hook)(py_func)` traces `py_func(scribe)` and leaves the finished
`HloModuleProto` in `.module_proto`.  Every CamelCase attribute of a shape is
an instruction: `scribe.f32[2, 3].Add(a, b)` appends an `add` of that result
shape to the computation being traced.  Keyword arguments are the fields of
`HloInstructionProto`, plus `to_apply` (a traced sub-computation) and
`constant_value` (a scalar literal).
"""

import re

import numpy as np

from torch_neuronx.pyhlo import hlo_pb2, xla_data_pb2

_DTYPES = ("pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "f8e4m3fn", "f8e5m2")
_OPCODES = {"Exp": "exponential", "Sin": "sine", "Cos": "cosine"}
_LIST_LITERALS = {"PRED": "preds", "S32": "s32s", "S64": "s64s", "U32": "u32s", "U64": "u64s", "F32": "f32s", "F64": "f64s"}


def _opcode(attribute):
    return _OPCODES.get(attribute) or re.sub(r"(?<!^)(?=[A-Z])", "-", attribute).lower()


def _sizes(index):
    try:
        return tuple(int(size) for size in index)
    except TypeError:
        return (int(index),)


def numpy_dtype(element_type):
    """NumPy dtype with the memory format of an HLO element type."""
    import ml_dtypes  # comes with jax

    name = xla_data_pb2.PrimitiveType.Name(element_type)
    special = {
        "PRED": np.bool_,
        "BF16": ml_dtypes.bfloat16,
        "F8E4M3FN": ml_dtypes.float8_e4m3fn,
        "F8E5M2": ml_dtypes.float8_e5m2,
    }
    if name in special:
        return np.dtype(special[name])
    kind = {"S": "int", "U": "uint", "F": "float"}[name[0]]
    return np.dtype(f"{kind}{name[1:]}")


def _fill(message, values):
    """Set protobuf fields from nested dicts, lists and scalars."""
    fields = message.DESCRIPTOR.fields_by_name
    for key, value in values.items():
        if key not in fields:
            raise TypeError(f"{message.DESCRIPTOR.name} has no field {key!r} (value {value!r})")
        if value is None:
            continue
        field = fields[key]
        nested = field.message_type is not None
        if _is_repeated(field):
            target = getattr(message, key)
            for item in value:
                if nested:
                    _fill(target.add(), item)
                else:
                    target.append(item if isinstance(item, (bytes, str)) else _plain(item))
        elif nested:
            getattr(message, key).SetInParent()
            _fill(getattr(message, key), value)
        else:
            setattr(message, key, value if isinstance(value, (bytes, str)) else _plain(value))


def _is_repeated(field):
    repeated = getattr(field, "is_repeated", None)
    return field.label == field.LABEL_REPEATED if repeated is None else repeated


def _plain(value):
    return value.item() if isinstance(value, np.generic) else value


class HloShape:
    """An array or tuple shape of a scribe; calling CamelCase attributes adds instructions."""

    def __init__(self, scribe, shape_proto):
        self.scribe = scribe
        self.shape_proto = shape_proto

    @property
    def sizes(self):
        return tuple(self.shape_proto.dimensions)

    @property
    def dtype(self):
        return self.scribe.scalar(self.shape_proto.element_type)

    def __getitem__(self, index):
        return self.scribe.array(self.shape_proto.element_type, _sizes(index))

    def get_tuple_element(self, tuple_index):
        return HloShape(self.scribe, self.shape_proto.tuple_shapes[tuple_index])

    def __getattr__(self, name):
        if not name[:1].isupper():
            raise AttributeError(name)

        def append(*operands, **fields):
            return self.scribe.append(self, _opcode(name), operands, fields)

        return append

    def _key(self):
        return self.shape_proto.SerializeToString(deterministic=True)

    def __eq__(self, other):
        return isinstance(other, HloShape) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __repr__(self):
        if self.shape_proto.tuple_shapes:
            return "(" + ", ".join(repr(HloShape(self.scribe, shape)) for shape in self.shape_proto.tuple_shapes) + ")"
        return f"{xla_data_pb2.PrimitiveType.Name(self.shape_proto.element_type).lower()}{list(self.sizes)}"


class HloValue(HloShape):
    """The result of one instruction."""

    def __init__(self, scribe, proto, computation):
        super().__init__(scribe, proto.shape)
        self.proto = proto
        self.computation = computation
        self.alias = None

    def set_alias_to(self, parameter, must=False):
        """Declare that this output shares the storage of `parameter`."""
        if parameter.proto.opcode != "parameter":
            raise ValueError(f"only a parameter can be an alias target, not {parameter.proto.opcode}")
        self.alias = (parameter.proto.parameter_number, must)

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class _Computation:
    def __init__(self, proto):
        self.proto = proto
        self.values = {}


class HloScribe:
    def __init__(self, serializer=None):
        self.serializer = serializer
        self.module_proto = None
        self._next_id = 0
        self._stack = []

    def scalar(self, element_type):
        return self.array(element_type, ())

    def array(self, element_type, sizes):
        proto = xla_data_pb2.ShapeProto(element_type=element_type)
        proto.dimensions.extend(sizes)
        proto.is_dynamic_dimension.extend([False] * len(sizes))
        proto.layout.minor_to_major.extend(reversed(range(len(sizes))))
        return HloShape(self, proto)

    def tuple(self, *shapes):
        proto = xla_data_pb2.ShapeProto(element_type=xla_data_pb2.TUPLE)
        for shape in shapes:
            proto.tuple_shapes.add().CopyFrom(shape.shape_proto)
        return HloShape(self, proto)

    def get_dtype(self, name):
        return getattr(self, name)

    def __getattr__(self, name):
        if name not in _DTYPES:
            raise AttributeError(name)
        return self.scalar(xla_data_pb2.PrimitiveType.Value(name.upper()))

    def __call__(self, py_func):
        name = getattr(py_func, "__name__", "module")
        self.module_proto = hlo_pb2.HloModuleProto(name=name)
        entry, root = self._trace(py_func, name)
        module = self.module_proto
        module.entry_computation_name = entry.proto.name
        module.entry_computation_id = entry.proto.id
        module.host_program_shape.CopyFrom(entry.proto.program_shape)
        outputs = [root]
        if root.proto.opcode == "tuple":
            outputs = [entry.values[operand] for operand in root.proto.operand_ids]
        for index, value in enumerate(outputs):
            if value.alias is not None:
                parameter_number, must = value.alias
                alias = module.input_output_alias.entries.add(parameter_number=parameter_number)
                if root.proto.opcode == "tuple":
                    alias.output_shape_index.append(index)
                alias.kind = hlo_pb2.MUST_ALIAS if must else hlo_pb2.MAY_ALIAS
        return self

    def add_computation(self, py_func, name):
        """Trace `py_func` as a further computation of the module; its id."""
        computation, _ = self._trace(py_func, name)
        return computation.proto.id

    def resume(self, module_proto):
        """Continue an existing module, for rewrites that add computations."""
        self.module_proto = module_proto
        ids = [computation.id for computation in module_proto.computations]
        ids += [instruction.id for computation in module_proto.computations for instruction in computation.instructions]
        self._next_id = max(ids, default=0) + 1
        return self

    def _trace(self, py_func, name):
        proto = hlo_pb2.HloComputationProto(id=self._new_id())
        proto.name = f"{name}.{proto.id}"
        computation = _Computation(proto)
        self._stack.append(computation)
        try:
            root = py_func(self)
        finally:
            self._stack.pop()
        if root.computation is not computation:
            raise ValueError(f"the result of {name} belongs to another computation")
        proto.root_id = root.proto.id
        parameters = sorted(
            (value for value in computation.values.values() if value.proto.opcode == "parameter"),
            key=lambda value: value.proto.parameter_number,
        )
        numbers = [value.proto.parameter_number for value in parameters]
        if numbers != list(range(len(numbers))):
            raise ValueError(f"parameter numbers of {name} are not 0..n-1: {numbers}")
        for value in parameters:
            proto.program_shape.parameters.add().CopyFrom(value.shape_proto)
            proto.program_shape.parameter_names.append(value.proto.name)
        proto.program_shape.result.CopyFrom(root.shape_proto)
        self.module_proto.computations.append(proto)  # callees end before their callers
        return computation, root

    def _new_id(self):
        self._next_id += 1
        return self._next_id

    def append(self, shape, opcode, operands, fields):
        computation = self._stack[-1]
        to_apply = fields.pop("to_apply", None)
        constant = fields.pop("constant_value", None)
        groups = fields.pop("replica_groups", None)
        proto = hlo_pb2.HloInstructionProto(opcode=opcode)
        proto.shape.CopyFrom(shape.shape_proto)
        for operand in operands:
            if not isinstance(operand, HloValue):
                raise TypeError(f"operand of {opcode} is no graph value: {operand!r}")
            if operand.computation is not computation:
                raise ValueError(f"operand of {opcode} belongs to another computation")
            proto.operand_ids.append(operand.proto.id)
        if constant is not None:
            self._scalar_literal(proto, constant)
        if groups is not None:
            for group in groups:
                proto.replica_groups.add().replica_ids.extend(int(rank) for rank in group)
        _fill(proto, fields)
        if to_apply is not None:
            called, _ = self._trace(to_apply, getattr(to_apply, "__name__", "to_apply"))
            proto.called_computation_ids.append(called.proto.id)
        proto.id = self._new_id()
        proto.name = f"{opcode}.{proto.id}"
        # Take the stored copy: later edits through the value must reach the module.
        computation.proto.instructions.append(proto)
        value = HloValue(self, computation.proto.instructions[-1], computation)
        computation.values[proto.id] = value
        return value

    @staticmethod
    def _scalar_literal(proto, constant):
        if proto.shape.dimensions:
            raise ValueError("constant_value makes scalars only")
        proto.literal.shape.CopyFrom(proto.shape)
        name = xla_data_pb2.PrimitiveType.Name(proto.shape.element_type)
        array = np.asarray(constant).astype(numpy_dtype(proto.shape.element_type))
        if name in _LIST_LITERALS:
            getattr(proto.literal, _LIST_LITERALS[name]).append(array.item())
        else:
            setattr(proto.literal, name.lower() + "s", array.tobytes())
