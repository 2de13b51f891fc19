"""Record the names that the Python bindings of TensorRT releases have.

    python -m tests.trt.record_api WHEEL ...

PyPI has the bindings of every release (tensorrt_cu12_bindings, tensorrt_cu13_bindings, tensorrt_rtx_cu12_bindings):
`pip download --no-deps` fetches them. The libraries that they bind need not be there. Bindings name their classes when
they are imported, and call into the libraries later: empty libraries of the right names do, which takes a C compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

API = Path(__file__).with_name("api.json")

# What this package uses, and some more.
CLASSES = (
    "Builder",
    "BuilderFlag",
    "ComputeCapability",
    "CudaGraphStrategy",
    "DataType",
    "EngineInspector",
    "ExecutionContextAllocationStrategy",
    "IAttention",
    "IAttentionInputLayer",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "IHostMemory",
    "IKVCacheUpdateLayer",
    "ILayer",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IProgressMonitor",
    "IRuntimeCache",
    "IRuntimeConfig",
    "ITensor",
    "ITimingCache",
    "LayerInformationFormat",
    "LayerType",
    "Logger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "ParserError",
    "ProfilingVerbosity",
    "Runtime",
    "TensorIOMode",
)
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
READ = """
import importlib.util, json, sys

def members(kind):
    of_enums = {"name", "value"} if hasattr(kind, "__members__") else set()
    return sorted(name for name in dir(kind) if not name.startswith("_") and name not in of_enums)

spec = importlib.util.spec_from_file_location(sys.argv[1], sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps({name: members(getattr(module, name)) for name in sys.argv[3:] if hasattr(module, name)}))
"""


def names_of(wheel: Path) -> dict[str, list[str]]:
    """The members of every class in `CLASSES` that the bindings in a wheel have."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)  # of wheels that you chose to give
        (library,) = (path for path in folder.glob("*_bindings/*.so"))
        text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        source = folder / "empty.c"
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
        for name in re.findall(r"\[(lib(?:nv|tensorrt)[^\]]*)\]", text):
            subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, source], check=True)
        done = subprocess.run(
            [sys.executable, "-c", READ, library.stem, library, *CLASSES],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
            capture_output=True,
            text=True,
            check=True,
        )
        names: dict[str, list[str]] = json.loads(done.stdout)
        return names


def main() -> None:
    """Write the names of the wheels that are given to api.json."""
    found = {}
    for wheel in map(Path, sys.argv[1:]):
        package, version = wheel.name.split("-")[:2]
        flavor = "rtx" if "_rtx_" in package else "tensorrt"
        found[f"{flavor} {version}"] = names_of(wheel)
    API.write_text(json.dumps(dict(sorted(found.items())), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
