"""What every backend on a GPU must do, whatever its numbers are. The emulated GPU has to pass the same."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.step_model import StepModel
from tfm_export.verify import GenerationComparison, compare_generations, read_golden

DECODES = 2000
# The allocators of CUDA and of Python take memory in pieces of megabytes; a leak of 4 kB a decode shows all the same.
MOST_DEVICE_GROWTH = MOST_HOST_GROWTH = 8 << 20


def compare_with_pytorch(model: StepModel, bundle: Bundle, variant: str) -> list[GenerationComparison]:
    """The bundle's golden inputs alone, batched and padded, each token beside PyTorch's."""
    manifest = bundle.manifest
    golden, precision = read_golden(bundle, GOLDEN), PRECISIONS[variant]
    return compare_generations(model, golden, manifest.special_ids, manifest.golden, precision, lambda _: None)


def decode_in_threads(model: StepModel, bundle: Bundle, *, threads: int = 6, rounds: int = 4) -> int:
    """Decode the same in one thread and in many at once; how many generations differ.

    The batches are the same in both, so that nothing but the other threads can make a difference.
    """
    special = bundle.manifest.special_ids
    sources = [golden.source_ids for golden in read_golden(bundle, GOLDEN)][:24]
    batches = [(sources[i::4], 1 + 3 * (i % 2)) for i in range(4)]

    def decode(batch: Sequence[list[int]], beam: int) -> list[list[int]]:
        options = DecodeOptions(beam_size=beam, max_decoding_length=30)
        return [result.hypotheses[0].tokens for result in generate(model, batch, options, special)]

    expected = [decode(*batch) for batch in batches]
    with ThreadPoolExecutor(threads) as pool:
        jobs = [(i, pool.submit(decode, *batches[i])) for _ in range(rounds) for i in range(4)]
        return sum(a != b for i, job in jobs for a, b in zip(job.result(), expected[i], strict=True))


def decode_many(
    model: StepModel, bundle: Bundle, free_bytes: Callable[[], int], *, decodes: int = DECODES
) -> dict[str, int]:
    """Decode batches of many sizes, greedily and with beams; what memory is gone that was there after the first fifth.

    Args:
        model: the backend.
        bundle: with golden inputs.
        free_bytes: of the device.
        decodes: sources, all together.

    Returns:
        `decodes`, `device_growth` and `host_growth`, in bytes.
    """
    sources = [golden.source_ids for golden in read_golden(bundle, GOLDEN)]
    generator, done, start = np.random.default_rng(0), 0, (0, 0)
    warm = decodes // 5
    while done < decodes:
        size, beam = int(generator.integers(1, 17)), int(generator.choice([1, 1, 4]))
        batch = [sources[i] for i in generator.integers(0, len(sources), size)]
        options = DecodeOptions(beam_size=beam, max_decoding_length=24, max_batch_size=8)
        generate(model, batch, options, bundle.manifest.special_ids)
        if done < warm <= done + size:
            start = _memory(free_bytes)
        done += size
    end = _memory(free_bytes)
    return {"decodes": done, "device_growth": start[0] - end[0], "host_growth": end[1] - start[1]}


def _memory(free_bytes: Callable[[], int]) -> tuple[int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return free_bytes(), pages * 4096
