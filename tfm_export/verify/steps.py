"""Step by step: log-probabilities and every cached tensor, of the graphs in float64 and of a runtime in float32.

Two questions, two verdicts. Is the graph right? The bundle's graphs in float64 are held to PyTorch in float64, to what
float64's rounding explains. Do the kernels compute it? A runtime's float32 is held to the graphs in float64, to what
float32's rounding explains. Neither hangs on how well a library happened to sum, see `tfm_export.verify.float64`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfm_export import graph
from tfm_export.bundle import Limits
from tfm_export.precision import FLOAT32_EPSILON, FLOAT64_EPSILON, TIMES_ROUNDING, TRIALS
from tfm_export.progress import Progress
from tfm_export.runtime.step_model import LARGEST_STEP, Floats, Ids, Mask, StepOutput
from tfm_export.verify.float64 import Float64Model, Moves
from tfm_export.verify.golden import Golden
from tfm_export.verify.report import TensorComparison

Trace = Mapping[str, NDArray[Any]]
TOP_IDS = "top_ids"

# Batch 1 without padding, batches with it, single tokens; the export traces batch 2, source 7, query 3, capacity 16.
RANDOM_CASES = (
    {"batch": 3, "source": 11, "target": 13, "prefix": 4, "seed": 1},
    {"batch": 1, "source": 5, "target": 6, "prefix": 1, "seed": 2},
    {"batch": 5, "source": 23, "target": 9, "prefix": 9, "seed": 3},
    {"batch": 2, "source": 1, "target": 1, "prefix": 1, "seed": 4},
)
GOLDEN_COUNT = 8
# What float64's rounding does is measured by moves that are larger, so that they stand out from it, and still so small
# that what they do grows with them: float32's moves may turn an attention from one key to another, and no farther.
FINE_EPSILON = 2.0**-44
# At the promised limits the last places, and some before them, are compared; a vocabulary at every place is too much.
PLACES_AT_LIMITS = 8
# The attention of the longest sequences, [B, H, S, S] in float64, may take so much memory in PyTorch.
ATTENTION_BYTES = 1 << 30


class SteppedSentences(Protocol):
    """A batch that teacher forcing steps through; every `Sentences` is one."""

    @property
    def capacity(self) -> int:
        """C, slots of each row."""
        ...

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        """Write tokens [B, Q] into the caches and say what may follow each."""
        ...

    def read(self, name: str) -> Floats:
        """A cache or cross-attention tensor, by its name in the graph's table."""
        ...


class SteppedModel(Protocol):
    """What teacher forcing can step through: every `StepModel`, and `Float64Model`."""

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> SteppedSentences:
        """Run the encoder on a padded batch [B, S]."""
        ...


@dataclass(frozen=True, kw_only=True)
class TeacherForcing:
    """Sources and targets, padded, and the places of the target at which log-probabilities are compared.

    Attributes:
        source_ids: [B, S] int64.
        source_mask: [B, S] bool.
        target_ids: [B, T] int64, from the start token on.
        prefix: how many target tokens are taken in first, as many at once as a step may take; the rest one by one.
        places: of the target, in order.
        trials: of rounding: the more numbers are compared, the fewer it takes to meet those that rounding moves most.
    """

    source_ids: Ids
    source_mask: Mask
    target_ids: Ids
    prefix: int
    places: Ids
    trials: int = TRIALS

    @classmethod
    def random(
        cls,
        dimensions: graph.Dimensions,
        *,
        batch: int,
        source: int,
        target: int,
        prefix: int,
        seed: int,
        most_places: int | None = None,
    ) -> TeacherForcing:
        """Draw ids; the sources of later rows are shorter, by as much for each."""
        rng = np.random.default_rng(seed)
        lengths = np.maximum(source - np.arange(batch) * max(1, source // batch), 1)
        return cls(
            source_ids=rng.integers(0, dimensions.source_vocabulary_size, (batch, source)),
            source_mask=np.arange(source) < lengths[:, None],
            target_ids=rng.integers(0, dimensions.target_vocabulary_size, (batch, target)),
            prefix=max(1, min(prefix, target)),
            places=np.unique(np.linspace(0, target - 1, min(target, most_places or target)).astype(np.int64)),
        )

    def trace(self, model: SteppedModel, dimensions: graph.Dimensions) -> Trace:
        """Feed the targets through a model's cache.

        Row i begins at slot i: rows need not write in step, and slots that nobody has written must not matter.

        Returns:
            What came of it, by name: log_probs [B, places, V], top_log_probs and top_ids [B, places, N], self-attention
            caches [B, H, T, D], cross-attention keys and values [B, H, S, D], 0 at the source's padding.
        """
        batch, length = self.target_ids.shape
        offset = np.arange(batch)
        sentences = model.encode(self.source_ids, self.source_mask, capacity=length + batch + 2)
        slots, first = np.arange(sentences.capacity), offset[:, None, None]
        outputs: list[list[NDArray[Any]]] = []
        for start, queries in self._pieces(dimensions.target_vocabulary_size):
            positions = np.broadcast_to(np.arange(start, start + queries), (batch, queries)).copy()
            mask = (slots >= first) & (slots <= (offset[:, None] + positions)[:, :, None])
            ids = self.target_ids[:, start : start + queries]
            output = sentences.step(ids, positions, offset + start, mask[:, None], full=True)
            assert output.log_probs is not None
            here = self.places[(self.places >= start) & (self.places < start + queries)] - start
            if here.size:
                found = (output.log_probs, output.top_log_probs, output.top_ids)
                outputs.append([x[:, here].copy() for x in found])
        names = ("log_probs", "top_log_probs", TOP_IDS)
        trace = {name: np.concatenate(parts, 1) for name, parts in zip(names, zip(*outputs, strict=True), strict=True)}
        for name in graph.self_cache_names(dimensions):
            cache = sentences.read(name)
            trace[name] = np.stack([cache[row, :, row : row + length] for row in range(batch)])
        for name in graph.cross_names(dimensions):
            trace[name] = np.where(self.source_mask[:, None, :, None], sentences.read(name), 0)
        return trace

    def _pieces(self, vocabulary: int) -> Iterator[tuple[int, int]]:
        """Where each step begins, and how many tokens it takes."""
        batch, length = self.target_ids.shape
        most, start = max(1, LARGEST_STEP // (batch * vocabulary)), 0
        while start < length:
            queries = min(most, self.prefix - start) if start < self.prefix else 1
            yield start, queries
            start += queries


def teacher_forcing(
    dimensions: graph.Dimensions, limits: Limits, golden: Sequence[Golden], start_token: int
) -> Iterator[tuple[str, TeacherForcing]]:
    """What to compare: random ids at shapes that no exporter has traced, golden inputs, and the promised limits.

    Args:
        dimensions: the model's.
        limits: the longest sequences that it takes.
        golden: inputs with PyTorch's generations; the first few are taken.
        start_token: begins each target.

    Yields:
        A name for people, and the ids.
    """
    yield from _usual_cases(dimensions, limits, golden, start_token)
    longest = longest_compared(dimensions.heads)
    source, target = min(limits.max_source_length, longest), min(limits.max_target_length, longest)
    sizes = {"source": source, "target": target, "prefix": target - 2, "most_places": PLACES_AT_LIMITS}
    batch = 2 if max(source, target) ** 2 * 2 <= longest**2 else 1
    name = f"sources of {source:,} and targets of {target:,} tokens"
    yield name, replace(TeacherForcing.random(dimensions, batch=batch, seed=5, **sizes), trials=1)


def longest_compared(heads: int) -> int:
    """How long a sequence may be for the attention of so many heads to be compared."""
    return max(1, int((ATTENTION_BYTES / (8 * heads)) ** 0.5))


def _usual_cases(
    dimensions: graph.Dimensions, limits: Limits, golden: Sequence[Golden], start_token: int
) -> Iterator[tuple[str, TeacherForcing]]:
    for case in RANDOM_CASES:
        source, target = min(case["source"], limits.max_source_length), min(case["target"], limits.max_target_length)
        yield "random ids", TeacherForcing.random(dimensions, **{**case, "source": source, "target": target})
    some = [one for one in golden if one.tokens][:GOLDEN_COUNT]
    if some:
        source_ids, source_mask = _padded([one.source_ids for one in some])
        target_ids, _ = _padded([[start_token, *one.tokens[:-1]] for one in some])
        places = np.arange(target_ids.shape[1])
        real = TeacherForcing(
            source_ids=source_ids,
            source_mask=source_mask,
            target_ids=target_ids,
            prefix=max(1, len(places) - 4),
            places=places,
        )
        yield "golden inputs", real


@dataclass(frozen=True, kw_only=True)
class StepsComparison:
    """The two verdicts.

    Attributes:
        graph: the graphs in float64 against PyTorch in float64; empty without PyTorch.
        kernels: the runtime against the graphs in float64; empty without a runtime.
        rounding: by how much float32's rounding changes each tensor.
        argmax_agreement: how often the runtime's best token is that of float64; None without a runtime.
    """

    graph: list[TensorComparison]
    kernels: list[TensorComparison]
    rounding: Mapping[str, float]
    argmax_agreement: float | None


@dataclass(frozen=True, kw_only=True)
class TracedReference:
    """PyTorch in float64, as far as it is.

    Attributes:
        trace: what it computes for sources and targets.
        tables: the graph's larger constants may be numbers that PyTorch computes in float64.
        float32_inside: it rounds to float32 in between, so that no graph can be closer to it than that.
    """

    trace: Callable[[TeacherForcing], Trace]
    tables: bool = False
    float32_inside: Callable[[], bool] = lambda: False


def compare_steps(
    folder: Path,
    dimensions: graph.Dimensions,
    cases: Iterator[tuple[str, TeacherForcing]],
    *,
    model: SteppedModel | None = None,
    reference: TracedReference | None = None,
    progress: Progress = lambda _: None,
) -> StepsComparison:
    """Run every case step by step.

    Args:
        folder: with the graphs of the variant in float32.
        dimensions: the model's.
        cases: see `teacher_forcing`.
        model: the runtime to judge; None to judge the graphs alone.
        reference: the same weights in PyTorch; None to judge the runtime alone.
        progress: told what begins.
    """
    exact = Float64Model.read(folder, dimensions)
    trials = [exact.moved(Moves(results=FLOAT32_EPSILON, seed=seed)) for seed in range(TRIALS)]
    fine_trials, constants = [], []
    if reference is not None:
        seeds = range(TRIALS // 2)
        fine_trials = [exact.moved(Moves(results=FINE_EPSILON, seed=seed)) for seed in seeds]
        in_constants = Moves(constants=FLOAT32_EPSILON / 2, tables=reference.tables)
        constants = [exact.moved(replace(in_constants, seed=seed)) for seed in seeds]
    graph_errors, kernel_errors, rounding, fine_rounding, stored = (_Largest() for _ in range(5))
    agreed: list[NDArray[np.bool_]] = []
    for name, case in cases:
        progress(f"comparing every tensor step by step, {name}")
        truth = case.trace(exact, dimensions)
        at_once = replace(case, prefix=case.target_ids.shape[1])  # rounds as much, and reads the weights once
        # Held to the same tokens at once: what a wrong step gives otherwise one by one is no rounding.
        unmoved = at_once.trace(exact, dimensions)
        for moved, largest in ((trials, rounding), (fine_trials, fine_rounding), (constants, stored)):
            for trial in moved[: case.trials]:
                largest.add(distances(at_once.trace(trial, dimensions), unmoved))
        if reference is not None:
            graph_errors.add(distances(truth, reference.trace(case)), name)
        if model is not None:
            found = case.trace(model, dimensions)
            kernel_errors.add(distances(found, truth), name)
            agreed.append(found["log_probs"].argmax(-1) == truth["log_probs"].argmax(-1))
    share = FLOAT64_EPSILON / FINE_EPSILON
    explained = {name: moved * share + stored[name] for name, moved in fine_rounding.items()}
    if reference is not None and reference.float32_inside():
        explained = rounding
    return StepsComparison(
        graph=_comparisons(graph_errors, explained),
        kernels=_comparisons(kernel_errors, rounding),
        rounding=rounding,
        argmax_agreement=float(np.concatenate([x.ravel() for x in agreed]).mean()) if agreed else None,
    )


def measure_tie_margin(
    folder: Path, dimensions: graph.Dimensions, limits: Limits, golden: Sequence[Golden], start_token: int
) -> float:
    """The margin between two tokens, in float64, below which one float32 may choose another token than the next one.

    Two computations, PyTorch's and a runtime's, may each be off by as much as the kernels' limit, at both tokens.

    Args:
        folder: with the graphs of the variant in float32.
        dimensions: the model's.
        limits: the longest sequences.
        golden: inputs with PyTorch's generations.
        start_token: begins each target.
    """
    cases = _usual_cases(dimensions, limits, golden, start_token)
    found = compare_steps(folder, dimensions, cases)
    return 2 * TIMES_ROUNDING * found.rounding["log_probs"]


def distances(found: Trace, expected: Trace) -> dict[str, float]:
    """The largest absolute difference of each tensor; infinite where a number is none.

    The best tokens may be others where two are equally good: each is held to what was expected of that token.
    """
    result = {}
    for name, tensor in found.items():
        if name == TOP_IDS:
            continue
        if name == "top_log_probs":
            truth = np.take_along_axis(expected["log_probs"], found[TOP_IDS], -1)
        else:
            truth = expected[name]
        error = float(np.abs(tensor.astype(np.float64) - truth).max(initial=0.0))
        result[name] = error if np.isfinite(error) else np.inf
    return result


class _Largest(dict[str, float]):
    """The largest number of each name, and in which case it was."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: dict[str, str] = {}

    def add(self, numbers: Mapping[str, float], case: str = "") -> None:
        for name, number in numbers.items():
            if name not in self or number > self[name]:
                self[name], self.cases[name] = number, case


def _comparisons(errors: _Largest, explained: Mapping[str, float]) -> list[TensorComparison]:
    return [
        TensorComparison(
            name=name,
            error=error,
            rounding=explained[name],
            limit=TIMES_ROUNDING * explained[name],
            case=errors.cases[name],
        )
        for name, error in errors.items()
    ]


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[Ids, Mask]:
    """Sequences as rows of one array, and where they are."""
    lengths = np.array([len(sequence) for sequence in sequences])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate([np.asarray(sequence) for sequence in sequences])
    return ids, mask
