"""The best tokens of a step, in two rounds: looking for them in a large vocabulary one by one takes long.

A maximum is what processors are fast at. The vocabulary is cut into chunks of equal size; the N best tokens are in the
N chunks with the highest maxima, and only these are searched. Measured with ONNX Runtime on 2 cores, 32,000 tokens,
N = 16: 25 us instead of 84 for a row, 1.0 ms instead of 4.8 for 128 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What `scores.topk(count)` gives, tokens of equal score in the order of their ids as ONNX's TopK has them.

    Args:
        scores: [B, Q, V].
        count: N.

    Returns:
        The highest scores in descending order, and their ids, [B, Q, N].
    """
    batch, queries, vocabulary = scores.shape
    size = chunk_size(vocabulary, count)
    if size is None:
        return scores.topk(count, -1)
    number = vocabulary // size
    chunks = scores.reshape(-1, number, size)
    _, best = chunks.amax(-1).topk(count, -1)  # [R, N]
    best, _ = best.topk(count, -1, largest=False)  # in the order of their ids again, and equal scores with them
    first = torch.arange(batch * queries)[:, None] * number
    candidates = nn.functional.embedding(first + best, chunks.reshape(-1, size)).reshape(-1, count * size)
    ids = (best[:, :, None] * size + torch.arange(size)).reshape(-1, count * size)
    found, places = candidates.topk(count, -1)
    return found.view(batch, queries, count), ids.gather(1, places).view(batch, queries, count)


def chunk_size(vocabulary: int, count: int) -> int | None:
    """Tokens of a chunk, with the least to be searched in both rounds; None where two rounds are no gain.

    Args:
        vocabulary: V, of which the size is a divisor.
        count: N.
    """
    divisors = [size for size in range(2, vocabulary) if vocabulary % size == 0 and vocabulary // size >= count]
    searched = {size: vocabulary // size + count * size for size in divisors}
    size = min(divisors, key=searched.__getitem__, default=None)
    return None if size is None or 4 * searched[size] > vocabulary else size
