"""The memory of batches on the device, against numpy's; and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulation import Machine, emulated_gpu
from tests.runtime.gpu.device_checks import BLOCKS, check_block
from tfm_export.runtime.gpu import cuda, device_memory
from tfm_export.runtime.gpu.cuda import CudaStream, OutOfDeviceMemory
from tfm_export.runtime.gpu.device_memory import BatchMemory, Lease, MemoryPool, RowShape, bucket

NAMES = ("self_key_0", "self_value_0"), ("cross_key_0",)
SHAPE = RowShape(heads=2, head_size=4, item_bytes=4)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated_gpu(Machine(memory_bytes=1 << 20)) as machine:
        yield machine
    assert machine.violations == []


@pytest.fixture
def stream(machine: Machine) -> Iterator[CudaStream]:
    assert machine
    stream = cuda.open_gpu().stream()
    yield stream
    stream.synchronize()
    stream.close()


def test_buckets_are_few_and_at_most_half_as_large_again() -> None:
    sizes = [bucket(count, 100) for count in range(1, 101)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert all(count <= size < 1.5 * count + 1 for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert (bucket(3, 100, 8), bucket(3, 5, 8), bucket(7, 7), bucket(9, 10)) == (8, 5, 7, 10)


@pytest.mark.parametrize(("shape", "rows", "length"), BLOCKS)
def test_blocks_are_as_in_numpy(stream: CudaStream, shape: RowShape, rows: int, length: int) -> None:
    check_block(stream, shape, rows, length)


class Pool:
    """A pool that tells what it forgets and whom it asks for memory."""

    def __init__(self, stream: CudaStream) -> None:
        self.forgotten: list[int] = []
        self.asked = 0
        self.pool = MemoryPool(stream, SHAPE, NAMES, forget=self._forget, reclaim=self._reclaim)

    def _forget(self, memory: BatchMemory) -> None:
        self.forgotten.append(memory.number)

    def _reclaim(self) -> None:
        self.asked += 1

    def lease(self, rows: int, source: int = 8, capacity: int = 8) -> Lease:
        return Lease(self.pool.take(rows, source, capacity), self.pool.give_back)


def test_memory_comes_again_zeroed(machine: Machine, stream: CudaStream) -> None:
    pool = Pool(stream)
    lease = pool.lease(2)
    first = lease.memory
    address = first.caches.address("self_value_0")
    assert pool.pool.lent == 1
    stream.synchronize()
    machine.find(address, 64, "device")[1][:] = 7
    del lease
    assert pool.pool.lent == 0
    assert {pool.lease(3).memory, pool.lease(2, source=12).memory, pool.lease(2, capacity=9).memory}.isdisjoint({first})
    again = pool.lease(1)
    assert again.memory is first  # the smallest that has as many rows
    stream.synchronize()
    assert not machine.find(address, 64, "device")[1].any()
    del again
    pool.pool.free_idle()
    assert machine.leaks() == ["a Stream"]
    assert len(pool.forgotten) == 4


def test_what_was_used_last_is_kept(machine: Machine, stream: CudaStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "IDLE_SHARE", 2000 / machine.memory_bytes)
    pool = Pool(stream)
    numbers = []
    for rows in (1, 2, 1, 3, 4, 4):  # 768 bytes a row; 2,000 may be idle, or two pieces
        lease = pool.lease(rows)
        numbers.append(lease.memory.number)
        del lease
    first, second, again, _, fifth, sixth = numbers
    assert again == first
    assert sixth == fifth
    assert pool.forgotten == [second, first]  # in the order of their last use
    pool.pool.free_idle()
    assert machine.leaks() == ["a Stream"]


def test_idle_memory_goes_before_there_is_none(machine: Machine, stream: CudaStream) -> None:
    pool = Pool(stream)
    kept = pool.lease(400)  # 307,200 bytes
    for rows in (300, 301, 302):
        pool.lease(rows)
    assert pool.asked == 0
    large = pool.lease(900)  # 691,200 bytes, all that is left
    assert pool.asked == 1
    assert len(pool.forgotten) == 3
    with pytest.raises(OutOfDeviceMemory):
        pool.lease(200)
    del kept, large
    pool.pool.free_idle()
    assert machine.leaks() == ["a Stream"]


def test_half_a_piece_is_not_left(machine: Machine, stream: CudaStream) -> None:
    with pytest.raises(OutOfDeviceMemory):
        BatchMemory(stream.gpu, SHAPE, NAMES, (1000, 1000, 8))  # caches fit, cross-attention keys and values do not
    assert machine.leaks() == ["a Stream"]
