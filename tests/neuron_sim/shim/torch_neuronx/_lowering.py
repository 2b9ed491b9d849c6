"""Rewrites device custom calls of a module as calls of plain HLO computations."""

import json

from torch_neuronx.pyhlo import hlo_pb2, xla_data_pb2
from torch_neuronx.pyhlo.scribe import HloScribe, HloShape


def _full(dtype, value, sizes):
    return dtype[sizes].Broadcast(dtype.Constant(constant_value=value), dimensions=[])


def _cast(value, dtype):
    return value if value.dtype == dtype else dtype[value.sizes].Convert(value)


def _reduce(value, dim, init, opcode):
    dtype = value.dtype

    def reducer(scribe):
        operands = [dtype.Parameter(parameter_number=number) for number in range(2)]
        return getattr(dtype, opcode)(*operands)

    sizes = [size for axis, size in enumerate(value.sizes) if axis != dim]
    return dtype[sizes].Reduce(value, dtype.Constant(constant_value=init), dimensions=[dim], to_apply=reducer)


def _expand(value, sizes, dim):
    """Broadcast a reduction over `dim` back to `sizes`."""
    return value.dtype[sizes].Broadcast(value, dimensions=[axis for axis in range(len(sizes)) if axis != dim])


def _elementwise(dtype, sizes, opcode, *operands):
    return getattr(dtype[sizes], opcode)(*operands)


def _rms_norm(scribe, result, operands, config):
    hidden, weight, eps = operands
    dim = int(config)
    f32, sizes = scribe.f32, hidden.sizes
    hidden = _cast(hidden, f32)
    square = f32[sizes].Multiply(hidden, hidden)
    total = _reduce(square, dim, 0.0, "Add")
    mean = f32[total.sizes].Divide(total, _full(f32, float(sizes[dim]), total.sizes))
    eps = f32[total.sizes].Broadcast(_cast(eps, f32), dimensions=[])
    scale = f32[total.sizes].Rsqrt(f32[total.sizes].Add(mean, eps))
    scaled = f32[sizes].Multiply(hidden, _expand(scale, sizes, dim))
    weight = f32[sizes].Broadcast(_cast(weight, f32), dimensions=[dim])
    return _cast(f32[sizes].Multiply(scaled, weight), result.dtype)


def _softmax(scribe, result, operands, config):
    (logits,) = operands
    dim = int(config)
    f32, sizes = scribe.f32, logits.sizes
    logits = _cast(logits, f32)
    largest = _reduce(logits, dim, float("-inf"), "Maximum")
    weights = f32[sizes].Exp(f32[sizes].Subtract(logits, _expand(largest, sizes, dim)))
    total = _reduce(weights, dim, 0.0, "Add")
    return _cast(f32[sizes].Divide(weights, _expand(total, sizes, dim)), result.dtype)


def _arg_max(scribe, result, operands, config):
    """Index of the first maximum."""
    (values,) = operands
    dim = int(config)
    s32, sizes = scribe.s32, values.sizes
    name = xla_data_pb2.PrimitiveType.Name(values.dtype.shape_proto.element_type)
    lowest = float("-inf") if "F" in name else 0 if name[0] in "UP" else -(2 ** (int(name[1:]) - 1))
    largest = _expand(_reduce(values, dim, lowest, "Maximum"), sizes, dim)
    hit = scribe.pred[sizes].Compare(values, largest, comparison_direction="EQ")
    positions = s32[sizes].Iota(dimensions=[dim])
    positions = s32[sizes].Select(hit, positions, _full(s32, sizes[dim] - 1, sizes))
    return _cast(_reduce(positions, dim, sizes[dim] - 1, "Minimum"), result.dtype)


def _top_k(scribe, result, operands, config):
    """The k largest along the last dimension, ties by lower index."""
    (values,) = operands
    k, dim, sizes = int(config), len(values.sizes) - 1, values.sizes
    dtype, s32 = values.dtype, scribe.s32

    def descending(scribe):
        left, right = (dtype.Parameter(parameter_number=number) for number in (0, 1))
        for number in (2, 3):
            s32.Parameter(parameter_number=number)
        return scribe.pred.Compare(left, right, comparison_direction="GT")

    pair = scribe.tuple(dtype[sizes], s32[sizes])
    ordered = pair.Sort(values, s32[sizes].Iota(dimensions=[dim]), dimensions=[dim], is_stable=True, to_apply=descending)
    window = [{"start": 0, "limit": size, "stride": 1} for size in sizes]
    window[dim]["limit"] = k
    outputs = []
    for index, kind in enumerate((dtype, s32)):
        part = kind[sizes].GetTupleElement(ordered, tuple_index=index)
        part = kind[(*sizes[:-1], k)].Slice(part, slice_dimensions=window)
        outputs.append(_cast(part, result.get_tuple_element(index).dtype))
    return result.Tuple(*outputs)


def _gelu_tanh(scribe, result, operands, config):
    (hidden,) = operands
    f32, sizes = scribe.f32, hidden.sizes

    def op(opcode, *args):
        return _elementwise(f32, sizes, opcode, *args)

    def number(value):
        return _full(f32, value, sizes)

    hidden = _cast(hidden, f32)
    cube = op("Multiply", hidden, op("Multiply", hidden, hidden))
    inner = op("Multiply", number((2 / 3.141592653589793) ** 0.5), op("Add", hidden, op("Multiply", number(0.044715), cube)))
    gate = op("Multiply", number(0.5), op("Add", number(1.0), op("Tanh", inner)))
    return _cast(op("Multiply", hidden, gate), result.dtype)


def _identity(scribe, result, operands, config):
    (value,) = operands
    return value.dtype[value.sizes].Copy(value)


def _cumsum(scribe, result, operands, axis):
    (values,) = operands
    dtype, sizes = values.dtype, values.sizes

    def reducer(scribe):
        left, right = (dtype.Parameter(parameter_number=number) for number in (0, 1))
        return dtype.Add(left, right)

    window = [{"size": 1, "stride": 1, "window_dilation": 1, "base_dilation": 1} for _ in sizes]
    window[axis].update(size=sizes[axis], padding_low=sizes[axis] - 1)
    return dtype[sizes].ReduceWindow(values, dtype.Constant(constant_value=0), window={"dimensions": window}, to_apply=reducer)


def _batched_dot(left):
    """Contracts axis `left` of the first operand with axis 1 of the second; axis 0 is the batch of both."""
    return {
        "lhs_batch_dimensions": [0],
        "rhs_batch_dimensions": [0],
        "lhs_contracting_dimensions": [left],
        "rhs_contracting_dimensions": [1],
    }


def _causal_attention(scribe, result, operands, scale):
    """query [n, head, q] and key [n, head, k], both transposed; value [n, k, head]."""
    query, key, value = (_cast(operand, scribe.f32) for operand in operands)
    f32, s32 = scribe.f32, scribe.s32
    sizes = (query.sizes[0], query.sizes[2], key.sizes[2])
    score = f32[sizes].Dot(query, key, dot_dimension_numbers=_batched_dot(1))
    score = f32[sizes].Multiply(score, _full(f32, scale, sizes))
    visible = scribe.pred[sizes].Compare(
        s32[sizes].Iota(dimensions=[1]), s32[sizes].Iota(dimensions=[2]), comparison_direction="GE"
    )
    score = f32[sizes].Select(visible, score, _full(f32, -1e30, sizes))
    weights = _softmax(scribe, f32[sizes], [score], "2")
    context = f32[result.sizes].Dot(weights, value, dot_dimension_numbers=_batched_dot(2))
    return _cast(context, result.dtype)


def _native_kernel(scribe, result, operands, config):
    """A hand-written device kernel; the stubs record which one was called."""
    call = json.loads(config)
    if call["kernel"] == "cumsum":
        return _cumsum(scribe, result, operands, call["axis"])
    if call["kernel"] == "attention_isa_kernel" and call["variant"] == "CausalAttentionMMSoftmaxMMWithoutSwap":
        return _causal_attention(scribe, result, operands, call["scale"])
    raise NotImplementedError(f"device kernel {call['kernel']!r} is not emulated")


_LOWERINGS = {
    "AwsNeuronRmsNorm": _rms_norm,
    "AwsNeuronSoftmax": _softmax,
    "AwsNeuronArgMax": _arg_max,
    "AwsNeuronTopK": _top_k,
    "AwsNeuronGeluApprxTanh": _gelu_tanh,
    "AwsNeuronTransferWithStaticRing": _identity,
    "AwsNeuronCustomNativeKernel": _native_kernel,
}


def _body(instruction, operand_shapes):
    """The computation that stands in for a custom call."""
    lowering, config = _LOWERINGS[instruction.custom_call_target], instruction.backend_config.decode()
    result_shape = instruction.shape

    def body(scribe):
        operands = [HloShape(scribe, shape).Parameter(parameter_number=number) for number, shape in enumerate(operand_shapes)]
        return lowering(scribe, HloShape(scribe, result_shape), operands, config)

    return body


def lower(module_bytes):
    """A copy of the module which XLA can compile for a CPU."""
    module = hlo_pb2.HloModuleProto()
    module.ParseFromString(module_bytes)
    module.ClearField("input_output_alias")  # the runtime copies outputs back itself
    computations = list(module.computations)
    scribe = HloScribe().resume(module)
    del module.computations[:]
    ids = {}
    for computation in computations:
        shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
        for instruction in computation.instructions:
            if instruction.opcode == "constant":
                instruction.literal.shape.layout.ClearField("memory_space")
            if instruction.opcode != "custom-call":
                continue
            target = instruction.custom_call_target
            if target not in _LOWERINGS:
                raise NotImplementedError(f"custom call {target!r} is not emulated")
            operand_shapes = [shapes[operand] for operand in instruction.operand_ids]
            signature = (shape.SerializeToString(deterministic=True) for shape in [instruction.shape, *operand_shapes])
            key = (target, instruction.backend_config, *signature)
            if key not in ids:
                ids[key] = scribe.add_computation(_body(instruction, operand_shapes), target)
            instruction.opcode = "call"
            instruction.ClearField("custom_call_target")
            instruction.ClearField("backend_config")
            instruction.called_computation_ids.append(ids[key])
        module.computations.append(computation)
    return module.SerializeToString()
