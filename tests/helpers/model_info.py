"""What the worker tells of its model, with the values of tests where a test names none."""

from protocol import ModelInfo

REST = {
    "model_dir": "",
    "prompt_logprobs": True,
    "sampling": "host",
    "quantize": None,
    "reads_images": False,
    "kv_cache_dtype": "",
    "kv_bytes_per_token": None,
    "anonymous_bytes": 0,
    "mapped_bytes": 0,
    "state_bytes": 0,
    "max_snapshots": 0,
    "neuron_versions": {},
    "sampling_defaults": {},
    "stop_strings": [],
    "adapters": {},
}


def info_of(*first, **rest):
    """`first`: the fields up to `dtype`, in their order."""
    return ModelInfo(*first, **REST | rest)
