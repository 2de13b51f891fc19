"""Live traffic: the sources of many callers are decoded together, each as it comes.

Callers put a call into the inbox and get a future. A worker thread reads it (tokenises, checks), has each of its
sources wait for its turn, lets them join an open batch, runs that batch step by step, and answers each when it ends.
There is a batch for each shape of options; a worker steps its batches in turn.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial

from tfm_export.decoding import DecodingSession, Reason, Request, Result, SettledToken
from tfm_export.decoding.session import unbegun
from tfm_export.decoding.waiting import WaitingRequests
from tfm_export.errors import ModelClosed, Overloaded, RequestError
from tfm_export.model.answers import Generation, Mailbox, joined
from tfm_export.model.observer import Observer, Report
from tfm_export.model.requests import Call, Source
from tfm_export.model.runner import NO_MEMORY, Runner
from tfm_export.runtime.forks import tell_of_forks

SPARE_LANES = 4  # open batches that a worker keeps while nobody is in them
FEW = 64  # deadlines of tasks that wait no longer, which may be kept
LOOK_SECONDS = 0.005  # between two looks at the cancellations of those that wait
STEP_SECONDS = 5.0  # longer than a step takes
RATE_SECONDS = 5.0  # over which answers are counted

Shape = tuple[int, int, str, int]
now = time.perf_counter


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A call from its arrival to its answer.

    Attributes:
        read: makes its sources of what the caller gave; an error is the answer.
        size: how many sources these are.
        call: its settings; it is cancelled, among others, by given_up.
        request_id: the caller's name for it, for observers and logs.
        future: what the caller waits for: a generation for each source, in order.
        given_up: set once the caller wants no answer any more.
        admitted: when it came, on the clock of `time.perf_counter`.
        tasks: what is decoded for it; none before it is read.
        missing: how many of these have no answer.
    """

    read: Callable[[Call], Sequence[Source]]
    size: int
    call: Call
    request_id: str = ""
    future: Future[list[Generation]] = field(default_factory=Future)
    given_up: threading.Event
    admitted: float
    tasks: list[Task] = field(default_factory=list)
    missing: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Task:
    """A source, or one of several draws from it, on its way through a batch.

    Attributes:
        ticket: whose it is.
        source: what is decoded.
        request: what decoding is asked for it.
        joined: when it joined a batch; None while it waits.
        first_token: when its first token settled, where the caller wants single tokens.
        answer: None while there is none.
    """

    ticket: Ticket
    source: Source
    request: Request
    joined: float | None = None
    first_token: float | None = None
    answer: Result | Exception | None = None

    def given_up(self) -> Reason | None:
        """Why it is to end before it has begun."""
        if self.request.cancelled is not None and self.request.cancelled.is_set():
            return Reason.CANCELLED
        if self.request.ends_at is not None and self.request.ends_at <= now():
            return Reason.BUDGET
        return Reason.DEADLINE if self.ends <= now() else None

    @property
    def ends(self) -> float:
        """When its deadline, or the budget of its call, is over."""
        r = self.request
        deadline = math.inf if r.deadline is None or r.admitted is None else r.admitted + r.deadline
        return deadline if r.ends_at is None else min(deadline, r.ends_at)


@dataclass(eq=False, kw_only=True)
class Lane:
    """An open batch of a worker.

    Attributes:
        session: decodes.
        tasks: those in it, by the session's numbers.
    """

    session: DecodingSession
    tasks: dict[int, Task] = field(default_factory=dict)


class Scheduler:
    """Decodes what many callers ask for, together. Safe to use from several threads.

    Args:
        runner: opens sessions and makes generations of their results.
        workers: threads that decode, each batches of its own.
        max_waiting: sources that may wait; while there are so many, more are refused.
        observer: told what happens.
    """

    def __init__(self, runner: Runner, *, workers: int, max_waiting: int, observer: Observer) -> None:
        self._runner, self._observer = runner, observer
        self._workers, self._max_waiting = workers, max_waiting
        self._closed = self._stopping = False
        self._begin()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Begin anew in a fork, which has no workers: what waits is the parent's, and has its answer there."""
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        # Guarded by it:
        self._inbox: deque[Ticket] = deque()
        self._waiting: dict[Shape, WaitingRequests[Task]] = {}
        self._deadlines: list[tuple[float, int, Task]] = []  # a heap, of those that wait
        self._cancellable: set[Task] = set()  # those that wait and have an event of the caller's own
        self._unanswered: set[Ticket] = set()
        self._threads: list[threading.Thread] = []
        self._size = self._idle = 0  # sources that wait; workers that wait for any
        self._counter, self._looked, self._answers = itertools.count(), 0.0, Rate()

    # For callers.

    def submit(self, ticket: Ticket) -> None:
        """Take a call in.

        Raises:
            ModelClosed: nothing more is taken.
            Overloaded: too many sources wait.
        """
        with self._changed:
            if self._closed:
                raise ModelClosed("the model is closed", "load the bundle again")
            if self._size >= self._max_waiting:
                raise Overloaded(
                    f"{self._size:,} sources wait already, of at most {self._max_waiting:,}",
                    retry_after=self._answers.seconds_for(self._size),
                )
            self._inbox.append(ticket)
            self._size += ticket.size
            self._unanswered.add(ticket)
            if not self._idle and len(self._threads) < self._workers:
                thread = threading.Thread(target=self._work, name=f"tfm-export-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Sources that wait for a place in a batch."""
        return self._size

    def give_up(self, ticket: Ticket) -> None:
        """End a call: what waits now, and what is being decoded before its next step.

        Its future is cancelled if nothing of it has begun; otherwise it gets what there is, for `Reason.CANCELLED`.
        """
        ticket.given_up.set()
        with self._changed:
            if ticket in self._inbox:
                self._inbox.remove(ticket)
                self._size -= ticket.size
            elif not ticket.tasks:
                return  # it is being read, or was answered
            waiting = [task for task in ticket.tasks if self._take_out(task)]
            begun = len(waiting) < len(ticket.tasks)
            if not begun:
                self._unanswered.discard(ticket)
                self._changed.notify_all()
        if not begun:
            ticket.future.cancel()
            return
        for task in waiting:
            self._settle(task, self._unbegun(task, Reason.CANCELLED))

    def close(self, drain: float | None) -> None:
        """Take nothing more, and come to an end.

        Args:
            drain: seconds in which all that was taken is decoded; what has no answer then gets `ModelClosed`. None
                decodes what is in a batch to its end, and gives all that waits `ModelClosed` at once.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if drain is not None:
                self._changed.wait_for(lambda: not self._unanswered, timeout=drain)
                self._stopping = True
            problem = ModelClosed("the model was closed before this was decoded", "close(drain=seconds)")
            unread, self._size = list(self._inbox), 0
            self._inbox.clear()
            waiting = [task for queue in self._waiting.values() for task in queue]
            self._waiting.clear()
            self._deadlines.clear()
            self._cancellable.clear()
            self._changed.notify_all()
        for ticket in unread:
            self._fail(ticket, problem)
        for task in waiting:
            self._settle(task, problem)

    def end(self) -> None:
        """Close, as nobody is left to read answers: the model was dropped, or the program ends.

        A thread that still computes while Python ends could crash it, so a step is waited for.
        """
        self.close(0.0)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(STEP_SECONDS)

    # A worker.

    def _work(self) -> None:
        lanes: dict[Shape, Lane] = {}
        while self._wait(lanes):
            self._read()
            self._answer_given_up()
            for shape in [*lanes, *(shape for shape in tuple(self._waiting) if shape not in lanes)]:
                self._turn(lanes, shape)
            for shape in [shape for shape, lane in lanes.items() if not lane.tasks][:-SPARE_LANES]:
                lanes.pop(shape).session.close()
        problem = ModelClosed("the model was closed before this was decoded", "close(drain=seconds)")
        for lane in lanes.values():
            lane.session.close()
            for task in lane.tasks.values():
                self._settle(task, problem)

    def _wait(self, lanes: dict[Shape, Lane]) -> bool:
        """Wait for something to do. Returns whether there is any."""
        if any(lane.tasks for lane in lanes.values()):
            return not self._stopping

        def there_is() -> bool:
            return bool(self._inbox) or any(self._waiting.values())

        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: there_is() or self._closed)
            self._idle -= 1
            return there_is() and not self._stopping

    def _read(self) -> None:
        """Have the sources of what is in the inbox wait for their turns."""
        while True:
            with self._changed:
                if not self._inbox:
                    return
                ticket = self._inbox.popleft()
                self._size -= ticket.size
            tasks: list[Task] = []
            try:
                tasks = self._tasks(ticket)
            except Exception as problem:  # noqa: BLE001 (the caller is told)
                self._fail(ticket, problem)
            with self._changed:
                if ticket.given_up.is_set():
                    self._unanswered.discard(ticket)
                    ticket.future.cancel()
                elif tasks and not ticket.call.options.return_alternatives:
                    self._put_in(ticket, tasks)
                    continue
                elif not tasks:  # an empty list has its answer; so has what failed
                    self._unanswered.discard(ticket)
            if ticket.future.done():
                continue
            if not tasks:
                _resolve(ticket.future, [])
                continue
            ticket.tasks, ticket.missing = tasks, len(tasks)
            self._decode_alone(tasks)

    def _tasks(self, ticket: Ticket) -> list[Task]:
        options = ticket.call.options
        sources = ticket.read(ticket.call)
        ticket.size = len(sources)
        draws = range(options.num_hypotheses if options.samples else 1)
        tasks = []
        for source, draw in itertools.product(sources, draws):
            task = Task(ticket=ticket, source=source, request=source.request)
            if draw:
                task.request = replace(task.request, draw=draw)
            if task.request.on_tokens is not None:
                task.request = replace(task.request, on_tokens=partial(_tell, task, task.request.on_tokens))
            tasks.append(task)
        return tasks

    def _put_in(self, ticket: Ticket, tasks: list[Task]) -> None:
        """Have tasks wait; the lock is held."""
        shape = ticket.call.options.batch_shape
        if (queue := self._waiting.get(shape)) is None:
            queue = self._waiting[shape] = WaitingRequests()
        ticket.tasks, ticket.missing, since = tasks, len(tasks), queue.turn
        for place, task in enumerate(tasks):
            queue.add(task, priority=task.request.priority, place=place, since=since)
            if task.ends < math.inf:
                heapq.heappush(self._deadlines, (task.ends, next(self._counter), task))
            if task.request.cancelled is not ticket.given_up:  # the caller has an event of its own
                self._cancellable.add(task)
        self._size += len(tasks)
        if len(self._deadlines) > 2 * self._size + FEW:  # most of it has joined a batch long ago
            self._deadlines = [entry for entry in self._deadlines if self._is_waiting(entry[2])]
            heapq.heapify(self._deadlines)
        if self._idle:
            self._changed.notify()

    def _is_waiting(self, task: Task) -> bool:
        return task in self._waiting.get(task.ticket.call.options.batch_shape, ())

    def _take_out(self, task: Task) -> bool:
        """Have a task wait no longer; the lock is held. Returns whether it did."""
        queue = self._waiting.get(task.ticket.call.options.batch_shape)
        if queue is None or not queue.discard(task):
            return False
        self._cancellable.discard(task)
        self._size -= 1
        return True

    def _answer_given_up(self) -> None:
        """Answer those that wait and whose deadlines are over, or that their callers gave up."""
        over: list[tuple[Task, Reason]] = []
        with self._changed:
            while self._deadlines and self._deadlines[0][0] <= now():
                task = heapq.heappop(self._deadlines)[2]
                if self._take_out(task):
                    over.append((task, task.given_up() or Reason.DEADLINE))
            if self._cancellable and now() - self._looked >= LOOK_SECONDS:
                self._looked = now()
                given_up = [task for task in self._cancellable if task.given_up() is Reason.CANCELLED]
                over += [(task, Reason.CANCELLED) for task in given_up if self._take_out(task)]
        for task, reason in over:
            self._settle(task, self._unbegun(task, reason))

    # A batch.

    def _turn(self, lanes: dict[Shape, Lane], shape: Shape) -> None:
        """Let those that wait join a batch of this shape, and give it a step."""
        lane = lanes.get(shape)
        if lane is None:
            with self._changed:
                queue = self._waiting.get(shape)
                first = queue.first if queue else None
            if first is None:
                return
            try:
                lane = lanes[shape] = Lane(session=self._runner.session(first.ticket.call.options))
                lane.session.mixes_lengths = True
                if lane.session.refill_at == 1:
                    # On CPUs a list is cheapest decoded batch by batch; who comes alone shall not wait for a batch's
                    # end, and costs no more when it joins at once (docs/decisions/0009-live-traffic.md).
                    lane.session.refill_at = 0.0
            except Exception as problem:  # noqa: BLE001 (the caller is told)
                with self._changed:
                    mine = self._take_out(first)
                if mine:
                    self._settle(first, problem)
                return
        self._join(lane, shape)
        if not lane.tasks:
            return
        others = any(other.tasks for other in lanes.values() if other is not lane)
        begin = now()
        try:
            answers = lane.session.step((lambda: True) if others else self._has_news)
        except Exception as problem:  # noqa: BLE001 (the callers are told)
            lanes.pop(shape)
            lane.session.close()
            self._decode_alone([*lane.tasks.values()], problem)
            return
        self._observer.stepped(len(lane.tasks), now() - begin)
        with Mailbox.together():
            for number, result in answers:
                self._settle(lane.tasks.pop(number), result)

    def _join(self, lane: Lane, shape: Shape) -> None:
        """Let as many join as there is room for."""
        while True:
            with self._changed:
                queue = self._waiting.get(shape)
                if not queue or not lane.session.has_room(len(queue.first.request.source)):
                    break
                task = queue.first
                self._take_out(task)
            if reason := task.given_up():
                self._settle(task, self._unbegun(task, reason))
                continue
            try:
                number = lane.session.add(task.request, task.ticket.call.options)
            except Exception as problem:  # noqa: BLE001 (the caller is told)
                self._settle(task, problem)
                continue
            lane.tasks[number], task.joined = task, now()
        self._observer.queued(self._size)

    def _has_news(self) -> bool:
        """Whether anything came that a batch should be interrupted for."""
        if self._stopping or self._inbox or (self._deadlines and self._deadlines[0][0] <= now()):
            return True
        return bool(self._cancellable) and now() - self._looked >= LOOK_SECONDS

    def _decode_alone(self, tasks: Sequence[Task], problem: Exception | None = None) -> None:
        """Decode tasks that cannot be part of an open batch, or those of one that failed, so that only some fail."""
        for task in tasks:
            if task.request.on_tokens is not None and task.first_token is not None:
                assert problem is not None
                self._settle(task, problem)  # its caller has seen tokens
                continue
            task.joined = task.joined or now()
            source, options = replace(task.source, request=task.request), task.ticket.call.options
            if options.samples:
                options = replace(options, num_hypotheses=1)  # the others are tasks of their own
            try:
                self._settle(task, self._runner.answers([source], options)[0])
            except MemoryError:
                self._settle(task, RequestError(*NO_MEMORY))
            except Exception as found:  # noqa: BLE001 (the caller is told)
                self._settle(task, found)

    # Answers.

    def _unbegun(self, task: Task, reason: Reason) -> Result:
        return unbegun(task.request, task.ticket.call.options, reason)

    def _settle(self, task: Task, answer: Result | Exception) -> None:
        """Give a task its answer, and the caller his once all have one."""
        ticket, end = task.ticket, now()
        try:
            if isinstance(answer, Result) and not isinstance(answer, Generation):
                answer = self._runner.generation(task.source, answer, ticket.call.options)
        except Exception as problem:  # noqa: BLE001 (the caller is told)
            answer = problem
        task.answer = answer
        self._observer.answered(
            Report(
                request_id=ticket.request_id,
                outcome=type(answer).__name__ if isinstance(answer, Exception) else answer.reason.value,
                source_tokens=len(task.request.source),
                target_tokens=0 if isinstance(answer, Exception) else len(answer.tokens),
                queue_seconds=(task.joined or end) - ticket.admitted,
                first_token_seconds=None if task.first_token is None else task.first_token - ticket.admitted,
                seconds=end - ticket.admitted,
            )
        )
        with self._changed:
            self._answers.count(end)
            ticket.missing -= 1
            if ticket.missing:
                return
            self._unanswered.discard(ticket)
            if self._closed:
                self._changed.notify_all()
        if errors := [task.answer for task in ticket.tasks if isinstance(task.answer, Exception)]:
            _resolve(ticket.future, errors[0])
        else:
            _resolve(ticket.future, _generations(ticket))

    def _fail(self, ticket: Ticket, problem: Exception) -> None:
        """Answer a call of which nothing can be decoded."""
        with self._changed:
            self._unanswered.discard(ticket)
            self._changed.notify_all()
        seconds = now() - ticket.admitted
        self._observer.answered(
            Report(
                request_id=ticket.request_id,
                outcome=type(problem).__name__,
                source_tokens=0,
                target_tokens=0,
                queue_seconds=seconds,
                first_token_seconds=None,
                seconds=seconds,
            )
        )
        _resolve(ticket.future, problem)


class Rate:
    """Answers a second, over the last seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=1024)

    def count(self, time: float) -> None:
        """Note an answer."""
        self._times.append(time)

    def seconds_for(self, answers: int) -> float:
        """How long so many will take; a second where nobody knows."""
        recent = [time for time in self._times if time >= now() - RATE_SECONDS]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return 1.0
        return answers * (recent[-1] - recent[0]) / (len(recent) - 1)


def _tell(
    task: Task, on_tokens: Callable[[list[SettledToken]], bool | None], tokens: list[SettledToken]
) -> bool | None:
    """Pass tokens on, and note when the first came."""
    task.first_token = task.first_token or now()
    return on_tokens(tokens)


def _generations(ticket: Ticket) -> list[Generation]:
    """Those of a call's sources; the draws from one are one generation."""
    answers = [task.answer for task in ticket.tasks]
    draws = len(answers) // ticket.size if ticket.size else 1
    if draws == 1:
        return [answer for answer in answers if isinstance(answer, Generation)]
    parts = [[a for a in answers[i : i + draws] if isinstance(a, Generation)] for i in range(0, len(answers), draws)]
    return [joined(several) for several in parts]


def _resolve(future: Future[list[Generation]], answer: list[Generation] | Exception) -> None:
    """Give a future its answer, unless its caller has cancelled it."""
    try:
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
    except InvalidStateError:
        pass  # cancelled meanwhile
