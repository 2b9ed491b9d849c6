"""Program metadata (names, shapes, aliases); built by the library, not interpreted here.

The real numbering is not public; only the attribute names matter in the simulator.
"""

from torch_neuronx import _schema

_TYPES = ["INVALID", "FLOAT", "INT32", "BYTE", "STRING", "INT64", "BFLOAT16", "FLOAT16", "UINT8", "INT8"]
_TYPES += ["INT16", "DOUBLE", "UINT16"]

_schema.build(
    "neuron_sim/metaneff.proto",
    "neuron_sim.metaneff",
    {},
    {
        "MetaTensor": "name=1 bytes; shape=2 *int64; data_type=3 MetaTensor.DataType",
        "MetaNeff": "input_tensors=1 *MetaTensor; output_tensors=2 *MetaTensor; output_aliases_to=3 map:int64,int64",
    },
    __name__,
    globals(),
    nested_enums={"MetaTensor": {"DataType": [(name, number) for number, name in enumerate(_TYPES)]}},
)
