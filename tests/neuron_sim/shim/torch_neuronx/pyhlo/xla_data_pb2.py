"""Shapes, literals and dimension-number messages of the HLO format."""

from torch_neuronx import _schema

_PRIMITIVE = [
    ("PRIMITIVE_TYPE_INVALID", 0),
    ("PRED", 1),
    ("S8", 2),
    ("S16", 3),
    ("S32", 4),
    ("S64", 5),
    ("U8", 6),
    ("U16", 7),
    ("U32", 8),
    ("U64", 9),
    ("F16", 10),
    ("F32", 11),
    ("F64", 12),
    ("TUPLE", 13),
    ("OPAQUE_TYPE", 14),
    ("C64", 15),
    ("BF16", 16),
    ("TOKEN", 17),
    ("C128", 18),
    ("F8E5M2", 19),
    ("F8E4M3FN", 20),
    ("F8E4M3", 28),
]
_DISTRIBUTION = [("RNG_INVALID", 0), ("RNG_UNIFORM", 1), ("RNG_NORMAL", 2)]

_MESSAGES = {
    "LayoutProto": "minor_to_major=1 *int64; memory_space=8 int64",
    "ShapeProto": """element_type=2 PrimitiveType; dimensions=3 *int64; tuple_shapes=4 *ShapeProto;
                     layout=5 LayoutProto; is_dynamic_dimension=6 *bool""",
    "ProgramShapeProto": "parameters=1 *ShapeProto; result=2 ShapeProto; parameter_names=3 *string",
    "OpMetadata": "op_type=1 string; op_name=2 string; source_file=3 string; source_line=4 int32",
    "LiteralProto": """shape=1 ShapeProto; preds=2 *bool; u8s=3 bytes; s32s=4 *int32; s64s=5 *int64;
                       u32s=6 *uint32; u64s=7 *uint64; f32s=8 *float; f64s=9 *double;
                       tuple_literals=10 *LiteralProto; f16s=11 bytes; bf16s=13 bytes; s8s=15 bytes;
                       u16s=16 bytes; s16s=17 bytes; f8e5m2s=19 bytes; f8e4m3fns=20 bytes""",
    "WindowDimension": """size=1 int64; stride=2 int64; padding_low=3 int64; padding_high=4 int64;
                          window_dilation=5 int64; base_dilation=6 int64; window_reversal=7 bool""",
    "Window": "dimensions=1 *WindowDimension",
    "GatherDimensionNumbers": """offset_dims=1 *int64; collapsed_slice_dims=2 *int64; start_index_map=3 *int64;
                                 index_vector_dim=4 int64""",
    "ScatterDimensionNumbers": """update_window_dims=1 *int64; inserted_window_dims=2 *int64;
                                  scatter_dims_to_operand_dims=3 *int64; index_vector_dim=4 int64""",
    "DotDimensionNumbers": """lhs_contracting_dimensions=1 *int64; rhs_contracting_dimensions=2 *int64;
                              lhs_batch_dimensions=3 *int64; rhs_batch_dimensions=4 *int64""",
    "PaddingConfigDimension": "edge_padding_low=1 int64; edge_padding_high=2 int64; interior_padding=3 int64",
    "PaddingConfig": "dimensions=1 *PaddingConfigDimension",
    "ReplicaGroup": "replica_ids=1 *int64",
    "FrontendAttributes": "map=1 map:string,string",
}

_schema.build(
    "neuron_sim/xla_data.proto",
    "neuron_sim.xla",
    {"PrimitiveType": _PRIMITIVE, "RandomDistribution": _DISTRIBUTION},
    _MESSAGES,
    __name__,
    globals(),
)
