"""An emulated GPU: the calls of CUDA and TensorRT that the runtimes make, on host memory, and stricter than a real one.

`emulated_gpu()` puts it in the place of cuda-python and both TensorRT libraries while something is loaded. New memory
is full of NaN, work is done when the host waits for it and not before, and whatever CUDA or TensorRT leave undefined
is an `EmulationError`: freed or unset addresses, work on the same memory in two streams that do not wait for each
other, memory freed in use, a graph launched after its context was changed, a cache that is not updated in place ...
"""

from tests.emulation.install import emulated_gpu
from tests.emulation.machine import EmulationError, Machine

__all__ = ["EmulationError", "Machine", "emulated_gpu"]
