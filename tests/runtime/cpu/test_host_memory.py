"""Memory that goes from batch to batch."""

from __future__ import annotations

import errno
import os
import threading
import warnings

import numpy as np
import pytest

from tests.skips import ON_LINUX, skip_if
from tfm_export.graph import Dimensions
from tfm_export.runtime.cpu.host_memory import LARGEST, HostMemory, HostPool

DIMENSIONS = Dimensions(
    source_vocabulary_size=9, target_vocabulary_size=9, decoder_layers=2, heads=3, head_size=5, candidates=4
)


def taken(pool: HostPool, nbytes: int) -> np.ndarray:
    return pool.array((nbytes,), "uint8")


def test_memory_comes_back_with_the_last_array_that_shows_it() -> None:
    pool = HostPool()
    first = pool.array((5, 5, 10), "float32")
    view = first.view(np.uint8).transpose(2, 0, 1)[3:]
    inner = first[1:].reshape(-1)[3:]
    place = first.ctypes.data
    del first
    other = taken(pool, 900)
    assert other.ctypes.data != place
    inner[:] = 1
    del view, inner
    again = taken(pool, 900)
    assert again.ctypes.data == place
    assert again.shape == (900,)


def test_the_smallest_piece_that_is_large_enough_is_taken() -> None:
    pool = HostPool()
    lent = {nbytes: taken(pool, nbytes) for nbytes in (3000, 1000, 2000)}
    places = {nbytes: array.ctypes.data for nbytes, array in lent.items()}
    lent.clear()
    first, second, third = taken(pool, 1001), taken(pool, 500), taken(pool, 2500)
    assert [a.ctypes.data for a in (first, second, third)] == [places[2000], places[1000], places[3000]]


def test_pieces_are_never_more_than_were_in_use_at_once() -> None:
    pool = HostPool()
    for nbytes in range(1000, 20_000, 1000):
        one, two = taken(pool, nbytes), taken(pool, nbytes + 10)
        del one, two
    sizes = [len(piece) for piece in [*pool._idle, *pool._returned]]
    assert sorted(sizes) == [19_000, 19_010]


def test_a_small_batch_does_not_take_what_a_large_one_left() -> None:
    pool = HostPool()
    large = [taken(pool, 100_000), taken(pool, 200_000)]
    places = {array.ctypes.data for array in large}
    del large
    small, medium = taken(pool, 5000), taken(pool, 100_000 // LARGEST + 1)
    assert small.ctypes.data not in places  # and the largest piece was given up for it
    assert medium.ctypes.data in places
    assert not pool._idle


def test_a_closed_pool_keeps_nothing() -> None:
    pool = HostPool()
    first, second = taken(pool, 1000), taken(pool, 1000)
    del first
    pool.close()
    assert not pool._idle
    second[:] = 1  # what is in use stays until it is not
    del second
    assert not pool._returned
    assert len(taken(pool, 1000)) == 1000


def test_memory_that_is_not_there_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = HostPool(), []

    def refuse(*_: object, **__: object) -> None:
        asked.append(len(pool._idle))
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    kept = taken(pool, 1000), taken(pool, 1000), taken(pool, 1000)
    del kept
    taken(pool, 500)
    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="no 20,000 bytes for a batch"):
        taken(pool, 20_000)
    assert asked == [2, 0]  # what is idle was freed before the second try
    with pytest.raises(MemoryError):
        HostPool().array((2**62,), "float32")


def test_threads_never_share_a_piece() -> None:
    pool, wrong = HostPool(), []

    def work(number: int) -> None:
        draw = np.random.default_rng(number)
        for _ in range(2000):
            piece = taken(pool, int(draw.integers(1, 5000)))
            piece[:] = number
            if not (piece == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(pool._idle) + len(pool._returned) <= 12  # a thread lets go of its last piece after it has the next


@skip_if(not hasattr(os, "fork"), "os.fork", *ON_LINUX)
def test_a_process_that_is_forked_off_has_memory_of_its_own() -> None:
    array = HostPool().array((1000,), "float32")
    array[:] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn where there are other threads
        child = os.fork()
    if not child:
        array[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert (array == 1).all()


def test_every_batch_begins_with_zeros() -> None:
    pools, mask = (HostPool(), HostPool()), np.ones((3, 4), np.bool_)
    for capacity in (7, 7, 3):
        memory = HostMemory(mask, capacity, DIMENSIONS, "float32", pools)
        arrays = [*memory.caches.values(), *memory.cross.values()]
        assert all(array.shape == (3, 3, capacity, 5) for array in memory.caches.values())
        assert not any(array.any() for array in arrays)
        for array in arrays:
            array.fill(np.nan)
    del arrays, memory


def test_a_batch_that_moves_takes_the_memory_of_one_cache_more() -> None:
    pools, mask = (HostPool(), HostPool()), np.ones((3, 4), np.bool_)
    places = []
    for _ in range(3):
        memory = HostMemory(mask, 6, DIMENSIONS, "float32", pools)
        memory.grow(9)
        memory.pack(np.zeros((3, 5), np.int64), 12)
        places.append({array.ctypes.data for array in (*memory.caches.values(), *memory.cross.values())})
        idle = [len(pool._idle) + len(pool._returned) for pool in pools]
        del memory
    assert idle == [1, 0]
    # The piece that is idle at the end is another one each time: of the 4 caches and 4 others, 9 pieces in all.
    assert len(places[0]) == 8
    assert len(places[1] | places[2]) <= 9
