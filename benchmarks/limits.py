"""What this machine could do at best: how fast it reads memory, and how fast it multiplies matrices.

A step of one sentence reads all weights of the decoder and does little with them: it cannot be faster than the weights
can be read. A step of many sentences multiplies with every weight once a sentence. The larger of the two times is the
floor beside the results.

    python -m benchmarks.limits [THREADS]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from benchmarks.work import decoder_step_work

REPEATS = 15


def measure(threads: int) -> dict[str, float]:
    """The best of several kernels and repeats, since a limit is what the machine can do when nothing disturbs it.

    Args:
        threads: as many as the contenders have.

    Returns:
        `read_bytes_per_second` over as much memory as the decoder's weights take, and `flops` of large float32 matrix
        products.
    """
    import torch

    torch.set_num_threads(threads)
    rows = int(decoder_step_work()["weight_bytes"]) // 4 // 2048
    matrix, vector = torch.randn(rows, 2048), torch.randn(2048)
    tall, short = matrix.view(-1, 512).view(512, -1), torch.randn(512)
    kernels: list[Callable[[], object]] = [lambda: matrix @ vector, lambda: short @ tall, matrix.sum, matrix.amax]
    reading = min(_fastest(kernel) for kernel in kernels)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    multiplying = _fastest(lambda: a @ b)
    return {"read_bytes_per_second": matrix.numel() * 4 / reading, "flops": 2 * 2048**3 / multiplying}


def _fastest(kernel: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        kernel()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def step_floor(limits: dict[str, float], rows: int) -> float:
    """Seconds that a float32 step of the base model takes at least.

    Args:
        limits: what `measure` gave.
        rows: sentences x beams.
    """
    work = decoder_step_work()
    return max(work["weight_bytes"] / limits["read_bytes_per_second"], rows * work["flops"] / limits["flops"])


if __name__ == "__main__":
    measured = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    print(
        json.dumps(
            {**measured, **{f"step_floor_ms_{rows}_rows": step_floor(measured, rows) * 1e3 for rows in (1, 8, 32)}}
        )
    )
