"""How fast a bundle decodes on this machine, how soon, and in how much memory."""

from tfm_export.bench.comparison import CellVerdict, compare
from tfm_export.bench.measurement import BenchOptions, bench_bundle
from tfm_export.bench.result import BenchResult, Cell, Loading, read_result

__all__ = [
    "BenchOptions",
    "BenchResult",
    "Cell",
    "CellVerdict",
    "Loading",
    "bench_bundle",
    "compare",
    "read_result",
]
