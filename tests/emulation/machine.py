"""The emulated machine: memory, streams and graphs. What is undefined on a real one is an error here."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

POISON = 0xFF  # four of them are a NaN of float32, two of float16 and of bfloat16
GAP = 1 << 16  # between pieces of device memory: no overrun ends in another piece


class EmulationError(AssertionError):
    """The runtime did what CUDA or TensorRT leave undefined."""


class Machine:
    """GPUs, and all that a process has on them. Calls come from `cudart` and `tensorrt`, not from the runtime.

    Args:
        memory_bytes: of each GPU.
        gpus: how many.

    Attributes:
        calls: how often each function of CUDA was called.
        violations: every error there was, also those that were raised where nobody sees them.
        lock: whoever changes anything holds it.
    """

    def __init__(self, memory_bytes: int = 8 << 30, gpus: int = 2) -> None:
        self.memory_bytes, self.gpus = memory_bytes, gpus
        self.calls: Counter[str] = Counter()
        self.violations: list[str] = []
        self.lock = threading.RLock()
        self._faults: dict[str, deque[Any]] = {}
        self._here = threading.local()
        self._next_address = 0x7000_0000_0000
        self._addresses: list[int] = []
        self._blocks: dict[int, Block] = {}
        self.handles: dict[int, Any] = {}  # streams, events, graphs and executables that are not destroyed
        self._numbers = itertools.count(101)
        self.synced: Counter[int] = Counter()  # how far the host has waited for each stream

    def error(self, message: str) -> EmulationError:
        """Note a violation; to be raised."""
        self.violations.append(message)
        return EmulationError(message)

    # Faults to order.

    def fail(self, function: str, result: Any, *, after: int = 0) -> None:
        """Let a call of a function give `result` instead of doing anything.

        Args:
            function: its name.
            result: what it gives.
            after: calls that do as usual first.
        """
        self._faults.setdefault(function, deque()).extend([None] * after + [result])

    def fault(self, function: str) -> Any:
        """The failure that was ordered for this call of a function; None for none."""
        self.calls[function] += 1
        waiting = self._faults.get(function)
        return waiting.popleft() if waiting else None

    # Devices of threads.

    @property
    def current(self) -> int:
        """The calling thread's GPU; as in CUDA the first unless it chose another."""
        return getattr(self._here, "device", 0)

    @current.setter
    def current(self, device: int) -> None:
        self._here.device = device

    @property
    def last_error(self) -> int:
        """The error of a call of the calling thread's, until it asks for it."""
        return getattr(self._here, "last_error", 0)

    @last_error.setter
    def last_error(self, error: int) -> None:
        self._here.last_error = error

    @property
    def capture(self) -> Stream | None:
        """The stream that the calling thread is capturing."""
        return getattr(self._here, "capture", None)

    @capture.setter
    def capture(self, stream: Stream | None) -> None:
        self._here.capture = stream

    # Memory.

    @property
    def live_blocks(self) -> list[Block]:
        """Memory that is not freed."""
        return [block for block in self._blocks.values() if not block.freed]

    def free_bytes(self) -> int:
        """Of the calling thread's GPU."""
        used = sum(b.nbytes for b in self.live_blocks if b.kind == "device" and b.device == self.current)
        return self.memory_bytes - used

    def allocate(self, nbytes: int, kind: str) -> int | None:
        """Memory full of NaN; None if there is not so much."""
        self._not_while_capturing("allocate")
        if kind == "device" and nbytes > self.free_bytes():
            return None
        data = np.full(nbytes, POISON, np.uint8)
        if kind == "device":
            address = self._next_address
            self._next_address += -(-nbytes // GAP) * GAP + GAP
        else:
            address = data.ctypes.data
        block = Block(address, nbytes, kind, self.current, data)
        if address not in self._blocks:
            bisect.insort(self._addresses, address)
        self._blocks[address] = block
        return address

    def free(self, address: int, kind: str) -> None:
        """Free memory that nothing is waiting to use."""
        self._not_while_capturing("free")
        block = self._blocks.get(address)
        if block is None or block.kind != kind:
            raise self.error(f"freed {address:#x}, which is not {kind} memory")
        if block.freed:
            raise self.error(f"freed {address:#x} twice")
        if self._is_waited_for(block):
            raise self.error(f"freed {address:#x}, which work still uses")
        block.freed = True
        block.data[:] = POISON  # the memory itself stays: pinned addresses are real ones, and must not come again

    def _is_waited_for(self, block: Block) -> bool:
        return any(
            stream_id in self.handles and number > self.handles[stream_id].done
            for stream_id, number, _ in block.accesses
        )

    def _not_while_capturing(self, what: str) -> None:
        if self.capture is not None:
            self.capture.captured = None  # CUDA invalidates the capture
            raise self.error(f"a thread that captures a graph may not {what} memory")

    def find(self, address: int, nbytes: int, kind: str) -> tuple[Block, NDArray[np.uint8]]:
        """The memory at an address; it must be live and large enough."""
        place = bisect.bisect_right(self._addresses, address) - 1
        block = self._blocks[self._addresses[place]] if place >= 0 else None
        if block is None or address + nbytes > block.address + block.nbytes:
            raise self.error(f"{nbytes} bytes at {address:#x} are not in one piece of {kind} memory")
        if block.freed:
            raise self.error(f"{address:#x} is freed")
        if block.kind != kind:
            raise self.error(f"{address:#x} is {block.kind} memory, not {kind}")
        offset = address - block.address
        return block, block.data[offset : offset + nbytes]

    # Things with a handle.

    def register(self, thing: Any) -> int:
        """A handle."""
        number = next(self._numbers)
        self.handles[number] = thing
        return number

    def thing(self, handle: Any, kind: type[Any]) -> Any:
        """What a handle is for."""
        found = self.handles.get(int(handle))
        if not isinstance(found, kind):
            raise self.error(f"handle {handle} is no {kind.__name__}, or no more")
        return found

    def leaks(self) -> list[str]:
        """What is left."""
        left = [f"{block.nbytes} bytes of {block.kind} memory" for block in self.live_blocks]
        return left + [
            thing if isinstance(thing, str) else f"a {type(thing).__name__}" for thing in self.handles.values()
        ]


@dataclass(eq=False)
class Block:
    """A piece of memory.

    Attributes:
        accesses: the stream, its work's number and whether it writes, of everything that was put on a stream.
    """

    address: int
    nbytes: int
    kind: str
    device: int
    data: NDArray[np.uint8]
    freed: bool = False
    accesses: list[tuple[int, int, bool]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Work:
    """Something put on a stream.

    Attributes:
        name: for messages.
        run: does it; everything it touches must be live by then.
        touches: address, size, kind of memory, and whether it is written.
        before: called when it is put on a stream, by itself or as part of a graph.
    """

    name: str
    run: Callable[[], None]
    touches: Sequence[tuple[int, int, str, bool]] = ()
    before: Callable[[], None] | None = None


@dataclass(eq=False)
class Event:
    """A place in the work of a stream.

    Attributes:
        place: the stream's handle and the number of its last work then; None until it is recorded.
    """

    place: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Graph:
    """Captured work."""

    work: list[Work]


@dataclass(frozen=True, eq=False)
class Executable:
    """A graph that can be launched."""

    work: list[Work]


class Stream:
    """Work in a row that waits until the host waits for it."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.device = machine, machine.current
        self.handle = machine.register(self)
        self.put = self.done = 0
        self.captured: list[Work] | None = None
        self.capturing = False
        self.queue: deque[tuple[int, Work]] = deque()
        self.seen: Counter[int] = Counter()  # how far the work put here from now on comes after that of other streams

    def submit(self, work: Work) -> None:
        """Put work on the stream, or into the graph that is being captured."""
        machine = self.machine
        if machine.current != self.device:
            raise machine.error(f"{work.name} on a stream of GPU {self.device} while GPU {machine.current} is current")
        blocks = [(machine.find(address, nbytes, kind)[0], write) for address, nbytes, kind, write in work.touches]
        if self.capturing:
            if self.captured is not None:
                self.captured.append(work)
            return
        if work.before is not None:
            work.before()
        self.put += 1
        for block, write in blocks:
            self._check_race(block, write, work)
            block.accesses.append((self.handle, self.put, write))
        self.queue.append((self.put, work))

    def _check_race(self, block: Block, write: bool, work: Work) -> None:
        synced, seen = self.machine.synced, self.seen
        block.accesses = [entry for entry in block.accesses if entry[1] > synced[entry[0]]]
        for stream, number, wrote in block.accesses:
            if stream != self.handle and (write or wrote) and number > seen[stream]:
                raise self.machine.error(f"{work.name} does not wait for what another stream does with the same memory")

    def wait_for(self, event: Event) -> None:
        """Let later work come after an event."""
        assert event.place is not None
        other, number = event.place
        stream: Stream = self.machine.thing(other, Stream)
        self.seen[other] = max(self.seen[other], number)
        for third, known in stream.seen.items():
            self.seen[third] = max(self.seen[third], known)
        self.submit(Work("a wait", lambda: stream.run(number)))

    def run(self, upto: int) -> None:
        """Do the work up to a number."""
        while self.queue and self.queue[0][0] <= upto:
            number, work = self.queue.popleft()
            for address, nbytes, kind, _ in work.touches:
                self.machine.find(address, nbytes, kind)  # freed meanwhile?
            work.run()
            self.done = number

    def synchronize(self) -> None:
        """Do everything."""
        if self.capturing:
            self.captured = None
            raise self.machine.error("a stream that is captured cannot be waited for")
        self.run(self.put)
        self.machine.synced[self.handle] = self.put

    def launch(self, executable: Executable) -> None:
        """Put the work of a graph on the stream."""
        for work in executable.work:
            self.submit(work)
