"""Every backend does what the protocol says, and all do the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.numerics import assert_close, exact_arrays
from tests.runtime.conftest import LIMITS, Backends
from tests.runtime.drive import RNG, Batch, padded
from tfm_export.errors import NumericError, RequestError
from tfm_export.graph import cross_names, self_cache_names
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.speculative import SpeculativeModel
from tfm_export.runtime.step_model import Sentences, StepModel

SOURCES = [[5, 7, 9, 11, 2], [4, 2], [8, 8, 10, 2], [30, 29, 28, 27, 26, 25, 24, 2]]


def test_each_step_is_the_whole_target_so_far(step_model: StepModel, backends: Backends) -> None:
    batch = Batch(step_model, backends.exact, SOURCES, capacity=20)
    assert batch.step(queries=5) <= 1
    for _ in range(4):
        assert batch.step() <= 1
    assert batch.step(queries=3) <= 1


def test_to_the_end_of_the_limits(step_model: StepModel, backends: Backends) -> None:
    longest = RNG(0).integers(3, 30, LIMITS.max_source_length).tolist()
    batch = Batch(step_model, backends.exact, [longest, [7]], capacity=LIMITS.max_target_length)
    assert batch.step(queries=LIMITS.max_target_length - 1) <= 1
    assert batch.step() <= 1


def test_rows_that_leave_join_and_grow_are_as_if_alone(step_model: StepModel, backends: Backends) -> None:
    batch = Batch(step_model, backends.exact, SOURCES[:3], capacity=4)
    errors = [batch.step(queries=2), batch.step(), batch.step()]
    batch.leave(0)
    batch.sentences.grow(8)
    errors += [batch.step(), batch.step()]
    batch.join([[6, 6, 2]])  # in the row that was left
    errors.append(batch.step())
    batch.join([SOURCES[3], [9]])  # with longer sources, and more rows than there ever were
    errors.append(batch.step())
    batch.leave(3)
    batch.leave(1)
    batch.sentences.grow(16)
    errors += [batch.step(queries=2) for _ in range(3)]
    batch.leave(len(batch.rows) - 1)  # the last row: nothing moves
    batch.join([[12, 2], [13, 13, 2]])
    errors.append(batch.step())
    assert max(errors) <= 1
    assert batch.sentences.size == len(batch.rows) == 4
    assert batch.sentences.capacity == 16


def test_rows_go_on_with_the_slots_that_they_keep(step_model: StepModel, backends: Backends) -> None:
    batch = Batch(step_model, backends.exact, SOURCES[:3], capacity=16)
    errors = [batch.step(queries=3)]
    batch.forget(0, 2)
    batch.forget(2, 1)
    errors.append(batch.step(queries=2))
    if batch.pack(7):  # fewer slots than there were, 4 of which hold a token of the row with the most
        assert batch.sentences.capacity == 7
        assert [row.written for row in batch.rows] == [3, 5, 4]
    else:
        assert batch.sentences.capacity == 16
    errors.append(batch.step())
    batch.leave(0)
    batch.forget(1, 1)
    packed = batch.pack(20)
    errors.append(batch.step(queries=2))
    batch.join([SOURCES[3]])
    errors.append(batch.step())
    assert max(errors) <= 1
    assert packed == (batch.sentences.capacity == 20)


def test_a_model_gives_what_it_promises_and_refuses_the_rest(step_model: StepModel) -> None:
    sentences = step_model.encode(*padded(SOURCES[:2]), capacity=8)
    for promise, method, protocol, given in (
        ("steps_greedily", "step_greedily", Sentences, sentences),
        ("steps_beams", "step_beams", Sentences, sentences),
        ("packs", "pack", Sentences, sentences),
        ("offers_attention", "with_attention", StepModel, step_model),
    ):
        overridden = getattr(type(given), method) is not getattr(protocol, method)
        assert overridden >= getattr(step_model.capabilities, promise), promise
    with pytest.raises(NotImplementedError, match="steps_beams"):
        sentences.step_beams(*[np.zeros(0)] * 5, end_ids=np.zeros(0), steps=1, until=lambda: False)


def test_several_greedy_steps_are_as_many_single_ones(step_model: StepModel, backends: Backends) -> None:
    batch = Batch(step_model, backends.exact, SOURCES[:3], capacity=16)
    assert batch.step(queries=2) <= 1
    batch.leave(0)
    batch.join([SOURCES[3]])  # which has written no slot
    assert batch.step() <= 1
    for steps, stop_after in ((5, 9), (4, 2), (1, 1)):
        told: list[list[int]] = []
        error = batch.step_greedily(
            steps, lambda tokens, told=told, n=stop_after: bool(told.append(tokens)) or len(told) == n
        )
        if error is None:
            assert not isinstance(step_model, OnnxModel | SpeculativeModel)
            return
        assert error <= 1
        assert len(told) == min(steps - 1, stop_after)
    assert batch.step() <= 1
    batch.sentences.grow(20)  # what the runs wrote is kept
    assert batch.step(queries=2) <= 1


def test_steps_that_run_out_of_slots_or_positions_are_refused(backends: Backends) -> None:
    sentences = backends.onnx.encode(*padded(SOURCES[:2]), capacity=8)
    mask = np.zeros((2, 1, 1, 8), np.bool_)
    mask[..., 0] = True
    ids, slots = np.array([[1], [1]]), np.array([0, 3])

    def run(steps: int, first: int = 0, ids: np.ndarray = ids, mask: np.ndarray = mask) -> object:
        positions = np.full(ids.shape, first)
        return sentences.step_greedily(ids, positions, slots, mask, steps=steps, until=lambda _: False)

    longest = LIMITS.max_target_length
    for arguments, message in (
        ((0,), "steps must be at least 1, found 0"),
        ((6,), "6 steps need 9 slots, and there are 8"),
        ((3, longest - 2), f"3 steps end at position {longest}, the last one is {longest - 1}"),
    ):
        with pytest.raises(RequestError, match=message):
            run(*arguments)
    with pytest.raises(RequestError, match="take one token each, found 2"):
        run(2, ids=np.ones((2, 2), np.int64), mask=np.repeat(mask, 2, axis=2))
    found = run(5)
    assert found is not None


def test_slots_that_do_not_fit_are_refused(backends: Backends) -> None:
    batch = Batch(backends.onnx, backends.exact, SOURCES[:2], capacity=8)
    assert batch.step(queries=3) <= 1
    wrong = [(np.zeros((1, 2), np.int64), 4), (np.zeros((2, 3), np.int64), 2)]
    wrong += [(np.array([[0, slot], [1, 2]]), 8) for slot in (-1, 8)]
    for slots, capacity in wrong:
        with pytest.raises(RequestError, match="expected slots of 2 rows from 0 to 7, at most"):
            batch.sentences.pack(slots, capacity)
    assert batch.step() <= 1


def test_rows_may_join_with_a_written_prefix(step_model: StepModel, backends: Backends) -> None:
    batch = Batch(step_model, backends.exact, SOURCES[:2], capacity=12)
    batch.step(queries=3)
    joining = Batch(step_model, backends.exact, SOURCES[2:], capacity=5)
    joining.step(queries=4)
    batch.sentences.append(joining.sentences)
    batch.rows += joining.rows
    assert max(batch.step(), batch.step(queries=2)) <= 1


def test_rows_cannot_join_with_more_than_fits(step_model: StepModel, backends: Backends) -> None:
    batch = Batch(step_model, backends.exact, SOURCES[:2], capacity=3)
    joining = Batch(step_model, backends.exact, SOURCES[2:], capacity=9)
    batch.sentences.append(joining.sentences)  # nothing is written yet
    joining.step(queries=4)
    with pytest.raises(RequestError, match="more slots than the 3"):
        batch.sentences.append(joining.sentences)


def test_backends_agree_on_every_tensor_of_a_beam_step(backends: Backends) -> None:
    # Two beams of two sentences, after a prefix of 3: slots 3, 4 then 5, 6; at the second step the beams change places.
    ids, mask = padded(SOURCES[:2], width=7)
    prefix = np.array([[1, 5, 6], [1, 9, 8]])
    names = [*self_cache_names(backends.onnx.dimensions), *cross_names(backends.onnx.dimensions)]

    def steps(model: StepModel) -> list[np.ndarray]:
        sentences = model.encode(ids, mask, capacity=9)
        first = (np.arange(9) <= np.arange(3)[:, None])[None, None].repeat(2, 0)
        sentences.step(prefix, np.arange(3)[None].repeat(2, 0), np.zeros(2, np.int64), first)
        path = np.zeros((2, 1, 2, 9), np.bool_)
        path[..., :3] = True
        path[:, 0, [0, 1], [3, 4]] = True
        sentences.step(np.array([[7, 10], [11, 12]]), np.full((2, 2), 3), np.full(2, 3), path)
        path = path[:, :, ::-1].copy()
        path[:, 0, [0, 1], [5, 6]] = True
        output = sentences.step(np.array([[13, 14], [15, 16]]), np.full((2, 2), 4), np.full(2, 5), path, full=True)
        assert output.log_probs is not None
        assert output.log_normaliser is not None
        outputs = [output.log_probs.copy(), output.top_log_probs.copy(), output.log_normaliser.copy()]
        return [*outputs, *map(sentences.read, names)]

    expected = exact_arrays(lambda: steps(backends.exact))
    for model in (backends.onnx, backends.torch):
        results = steps(model)
        for found, exact in zip(results, expected, strict=True):
            assert_close(found, exact)
        assert not results[3][:, :, 7:].any()  # slots that nobody wrote are zero


def test_padded_keys_and_values_are_zero(step_model: StepModel) -> None:
    ids, mask = padded([[4, 5, 6], [7]], width=5)
    cross = step_model.encode(ids, mask, capacity=1).read("cross_value_1")
    assert not cross[0, :, 3:].any()
    assert not cross[1, :, 1:].any()
    assert np.abs(cross[0, :, :3]).min() > 0


def test_log_probs_come_when_asked_for(step_model: StepModel) -> None:
    sentences, arguments = one_step(step_model)
    plain = sentences.step(*arguments)
    assert plain.log_probs is None
    assert plain.log_normaliser is None
    full = sentences.step(*arguments, full=True)
    assert full.log_probs is not None
    assert full.log_probs.shape == (2, 1, step_model.dimensions.target_vocabulary_size)
    np.testing.assert_array_equal(np.sort(full.log_probs)[..., ::-1][..., :16], full.top_log_probs)
    assert sentences.step(*arguments).log_probs is None


def test_any_integers_are_taken(step_model: StepModel) -> None:
    sentences, (ids, positions, write_index, mask) = one_step(step_model)
    expected = sentences.step(ids, positions, write_index, mask).top_log_probs.copy()
    narrow = [x.astype(np.int32) for x in (ids, positions, write_index)]
    np.testing.assert_array_equal(sentences.step(*narrow, mask).top_log_probs, expected)


def one_step(model: StepModel) -> tuple[Sentences, list[np.ndarray]]:
    """Two rows of 6 slots, and the arguments of a step that fits."""
    sentences = model.encode(*padded(SOURCES[:2]), capacity=6)
    mask = np.zeros((2, 1, 1, 6), np.bool_)
    mask[..., 0] = True
    return sentences, [np.array([[5], [6]]), np.zeros((2, 1), np.int64), np.zeros(2, np.int64), mask]


BAD_STEPS = {
    "target_ids must be from 0 to 33, found 34: rows 1": (0, (1, 0), 34),
    "target_ids must be from 0 to 33, found -1: rows 0": (0, (0, 0), -1),
    "positions must be from 0 to 49, found 50: rows 1": (1, (1, 0), 50),
    "positions must be from 0 to 49, found -3: rows 1": (1, (1, 0), -3),
    "1 tokens do not fit into 6 slots from slot 6 on: rows 1": (2, 1, 6),
    "1 tokens do not fit into 6 slots from slot -1 on: rows 0": (2, 0, -1),
    "self_mask lets a query see no slot at all: rows 1": (3, (1, 0, 0, 0), False),
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_a_step_out_of_range_is_refused_and_changes_nothing(step_model: StepModel, message: str) -> None:
    sentences, arguments = one_step(step_model)
    expected = sentences.step(*arguments).top_log_probs.copy()
    cache = sentences.read("self_key_0")
    bad = [argument.copy() for argument in arguments]
    which, index, value = BAD_STEPS[message]
    bad[which][index] = value
    with pytest.raises(RequestError) as error:
        sentences.step(*bad)
    assert error.value.problems == [message]
    np.testing.assert_array_equal(sentences.read("self_key_0"), cache)
    np.testing.assert_array_equal(sentences.step(*arguments).top_log_probs, expected)


def test_every_problem_of_a_step_is_told(step_model: StepModel) -> None:
    sentences, arguments = one_step(step_model)
    for which, index, value in BAD_STEPS.values():
        arguments[which][index] = value
    with pytest.raises(RequestError) as error:
        sentences.step(*arguments)
    assert len(error.value.problems) == 4
    assert "slot -1, 6 on: rows 0, 1" in str(error.value)


def test_more_queries_than_slots_are_refused(step_model: StepModel) -> None:
    sentences, _ = one_step(step_model)
    mask = np.ones((2, 1, 7, 6), np.bool_)
    with pytest.raises(RequestError, match="7 tokens do not fit into 6 slots"):
        sentences.step(np.ones((2, 7), np.int64), np.zeros((2, 7), np.int64), np.zeros(2, np.int64), mask)


@pytest.mark.parametrize(
    ("which", "array", "message"),
    [
        (0, np.array([[5]]), r"target_ids must have the shape \[2, 1\], found \[1, 1\]"),
        (0, np.array([5, 6]), r"target_ids must have the shape \[2, 1\], found \[2\]"),
        (0, np.zeros((2, 0), np.int64), r"target_ids must have the shape \[2, 1\], found \[2, 0\]"),
        (0, np.array([[5.0], [6.0]]), "target_ids must be integers, found float64"),
        (1, np.array([[0, 1], [0, 1]]), r"positions must have the shape \[2, 1\], found \[2, 2\]"),
        (2, np.array([0]), r"write_index must have the shape \[2\], found \[1\]"),
        (3, np.ones((2, 1, 1, 5), np.bool_), r"self_mask must have the shape \[2, 1, 1, 6\], found \[2, 1, 1, 5\]"),
        (3, np.ones((2, 1, 1, 6), np.int64), "self_mask must be bool, found int64"),
    ],
)
def test_a_step_of_another_form_is_refused(step_model: StepModel, which: int, array: np.ndarray, message: str) -> None:
    sentences, arguments = one_step(step_model)
    arguments[which] = array
    with pytest.raises(RequestError, match=message):
        sentences.step(*arguments)


@pytest.mark.parametrize(
    ("ids", "mask", "capacity", "message"),
    [
        ([[4, 31]], [[True, True]], 1, "source_ids must be from 0 to 30, found 31: rows 0"),
        ([[4, -1]], [[True, True]], 1, "source_ids must be from 0 to 30, found -1: rows 0"),
        ([[4], [5]], [[True], [False]], 1, "sources without a single token: rows 1"),
        ([[4]], [[True]], 0, "capacity must be at least 1, found 0"),
        ([[4] * 41], [[True] * 41], 1, "a source may have 40 tokens, found 41"),
        ([[4]], [[True, True]], 1, "source_mask must be"),
        ([[]], [[]], 1, "without an empty axis"),
        ([[4]], [[1]], 1, "source_mask must be bool, found int64"),
    ],
)
def test_sources_that_the_encoder_cannot_take(
    step_model: StepModel, ids: list[list[int]], mask: list[list[bool]], capacity: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        step_model.encode(np.array(ids), np.array(mask), capacity=capacity)


def test_numbers_that_are_not_finite_are_an_error(backends: Backends) -> None:
    sentences, arguments = one_step(backends.onnx)
    sentences.step(*arguments)
    sentences.memory.caches["self_value_1"][1, :, 5] = np.nan  # in a slot that no query sees
    with pytest.raises(NumericError, match=r"not finite: rows 1\n"):
        sentences.step(*arguments)
    sentences.shrink(1)  # the other row is sound
    assert np.isfinite(sentences.step(*(x[:1] for x in arguments)).top_log_probs).all()


def test_rows_are_cleared_before_they_are_used_again(backends: Backends) -> None:
    batch = Batch(backends.onnx, backends.exact, SOURCES[:3], capacity=6)
    batch.step()
    for arrays in (batch.sentences.memory.caches, batch.sentences.memory.cross):
        for array in arrays.values():
            array[2] = np.nan
    batch.leave(2)
    batch.join([[6, 2]])
    assert batch.step() <= 1


@pytest.mark.parametrize("rows", [(2, 0), (0, 2), (-1, 0)])
def test_only_rows_in_use_move(step_model: StepModel, rows: tuple[int, int]) -> None:
    sentences, _ = one_step(step_model)
    with pytest.raises(RequestError, match="a row must be from 0 to 1"):
        sentences.move(*rows)


def test_batches_change_in_their_own_direction_only(step_model: StepModel, backends: Backends) -> None:
    sentences, _ = one_step(step_model)
    with pytest.raises(RequestError, match="2 rows cannot shrink to 3"):
        sentences.shrink(3)
    with pytest.raises(RequestError, match="6 slots cannot grow to 5"):
        sentences.grow(5)
    with pytest.raises(RequestError, match="the same model"):
        sentences.append(one_step(backends.exact)[0])
    with pytest.raises(RequestError, match="no tensor 'self_key_7'"):
        sentences.read("self_key_7")
