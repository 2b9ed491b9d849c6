"""HLO modules, computations and instructions."""

from torch_neuronx import _schema
from torch_neuronx.pyhlo import xla_data_pb2  # noqa: F401  (registers the imported file)

_MESSAGES = {
    "SliceDimensions": "start=1 int64; limit=2 int64; stride=3 int64",
    "HloInstructionProto": """
        name=1 string; opcode=2 string; shape=3 ShapeProto; metadata=7 OpMetadata; literal=8 LiteralProto;
        parameter_number=9 int64; tuple_index=13 int64; dimensions=14 *int64; window=15 Window;
        slice_dimensions=17 *SliceDimensions; dynamic_slice_sizes=20 *int64; padding_config=21 PaddingConfig;
        distribution=23 RandomDistribution; epsilon=24 float; feature_index=25 int64; channel_id=26 int64;
        custom_call_target=28 string; dot_dimension_numbers=30 DotDimensionNumbers;
        gather_dimension_numbers=33 GatherDimensionNumbers; gather_slice_sizes=34 *int64; id=35 int64;
        operand_ids=36 *int64; control_predecessor_ids=37 *int64; called_computation_ids=38 *int64;
        backend_config=43 bytes; scatter_dimension_numbers=48 ScatterDimensionNumbers;
        replica_groups=49 *ReplicaGroup; is_stable=60 bool; comparison_direction=63 string;
        indices_are_sorted=67 bool; frontend_attributes=68 FrontendAttributes; unique_indices=69 bool;
        use_global_device_ids=71 bool""",
    "HloComputationProto": """name=1 string; instructions=2 *HloInstructionProto; program_shape=4 ProgramShapeProto;
                              id=5 int64; root_id=6 int64""",
    "AliasEntryProto": """output_shape_index=1 *int64; parameter_number=2 int64; parameter_shape_index=3 *int64;
                          kind=4 AliasKind""",
    "HloInputOutputAliasProto": "entries=1 *AliasEntryProto",
    "HloModuleProto": """name=1 string; entry_computation_name=2 string; computations=3 *HloComputationProto;
                         host_program_shape=4 ProgramShapeProto; id=5 int64; entry_computation_id=6 int64;
                         input_output_alias=8 HloInputOutputAliasProto; frontend_attributes=19 FrontendAttributes""",
    "HloProto": "hlo_module=1 HloModuleProto",
    "HloSnapshot": "hlo=1 HloProto; arguments=2 *LiteralProto; result=3 LiteralProto; execution_platform=4 string",
}

_schema.build(
    "neuron_sim/hlo.proto",
    "neuron_sim.xla",
    {"AliasKind": [("UNDEFINED_ALIAS", 0), ("MAY_ALIAS", 1), ("MUST_ALIAS", 2)]},
    _MESSAGES,
    __name__,
    globals(),
    imports=["neuron_sim/xla_data.proto"],
    known_enums=["PrimitiveType", "RandomDistribution"],
)
