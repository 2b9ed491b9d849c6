"""The simulated device of bench/simulated, with faults on purpose.

The file that FAULT names makes the next decode step fail, and is removed: "hang" never returns, "step" is an error of the device.
"""

import importlib.util
import os
import threading
from pathlib import Path

BENCH = Path(__file__).resolve().parents[4] / "bench"
spec = importlib.util.spec_from_file_location("simulated", BENCH / "simulated" / "transformers_neuronx" / "__init__.py")
simulated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(simulated)
ContinuousBatchingConfig, NeuronConfig = simulated.ContinuousBatchingConfig, simulated.NeuronConfig
__version__ = simulated.__version__
FAULT = Path(os.environ["FAULT"])


class LlamaForSampling(simulated.LlamaForSampling):
    def __call__(self, ids, positions, slots):
        if ids.shape[1] == 1 and FAULT.exists():
            fault = FAULT.read_text()
            FAULT.unlink()
            if fault == "hang":
                threading.Event().wait()
            raise RuntimeError('nrt_execute status=1004 message="Execution error"')
        return super().__call__(ids, positions, slots)
