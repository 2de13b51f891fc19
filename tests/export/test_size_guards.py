"""Code that branches on sizes: refused with its line where a trace does not hold for what a bundle promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints.test_adapter import IDS, Alibi
from tfm_export.bundle import Limits
from tfm_export.errors import ExportError
from tfm_export.export import export_bundle
from tfm_export.export.variant import write_fp32_variant


class Encoding(Alibi):
    """Takes the encoder's way from a function of ids [B, S] and a mask."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.change = change

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        return self.embedding(source_ids) * self.change(source_ids, source_mask)


class Stepping(Alibi):
    """Takes the decoder's way from a function of the step's ids [B, Q], self_mask and source_mask."""

    def __init__(self, change: Callable[[Tensor, Tensor, Tensor], Tensor], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.change = change

    def decode_step(self, target_ids: Tensor, positions: Tensor, self_mask: Tensor, *others: Any) -> Tensor:
        logits = super().decode_step(target_ids, positions, self_mask, *others)
        return logits * self.change(target_ids, self_mask, others[0])


def above_33(ids: Tensor, _mask: Tensor) -> Tensor:
    if ids.size(1) > 33:  # here
        return torch.tensor(2.0)
    return torch.tensor(1.0)


def exactly_7(ids: Tensor, _mask: Tensor) -> Tensor:
    return torch.tensor(2.0 if ids.size(1) == 7 else 1.0)  # here


def odd(ids: Tensor, _mask: Tensor) -> Tensor:
    return torch.tensor(1.0 + ids.size(1) % 2 if ids.size(1) % 2 else 4.0)  # here


def above_3(ids: Tensor, _mask: Tensor) -> Tensor:
    return torch.tensor(2.0 if ids.size(1) > 3 else 1.0)  # here


def above_1(ids: Tensor, _mask: Tensor) -> Tensor:
    return torch.tensor(1.0 if ids.size(1) > 1 else 2.0)


def wider_than_long(ids: Tensor, _mask: Tensor) -> Tensor:
    return torch.tensor(2.0 if ids.size(0) > ids.size(1) else 1.0)  # here


def longer_base(ids: Tensor, _mask: Tensor) -> Tensor:
    base = 10000.0 if ids.size(1) <= 40 else 40000.0  # here
    return base ** (-torch.arange(21) / 21)


def short_table(ids: Tensor, _mask: Tensor) -> Tensor:
    return torch.ones(ids.shape)[..., None] * torch.ones(64, 21)[: ids.size(1)]  # here


def many_queries(ids: Tensor, _self: Tensor, _source: Tensor) -> Tensor:
    return torch.tensor(2.0 if ids.size(1) > 40 else 1.0)  # here


def many_slots(_ids: Tensor, self_mask: Tensor, _source: Tensor) -> Tensor:
    return torch.tensor(2.0 if self_mask.size(3) > 40 else 1.0)  # here


def many_rows(ids: Tensor, _self: Tensor, _source: Tensor) -> Tensor:
    return torch.tensor(2.0 if ids.size(0) > 40 else 1.0)  # here


def as_long_as_the_source(ids: Tensor, _self: Tensor, source_mask: Tensor) -> Tensor:
    return torch.tensor(2.0 if ids.size(1) == source_mask.size(3) else 1.0)  # here


def fewer_slots_than_tokens(ids: Tensor, self_mask: Tensor, _source: Tensor) -> Tensor:
    return torch.tensor(2.0 if ids.size(1) > self_mask.size(3) else 1.0)


LONG = {"max_length": 100, "max_target_length": 100}


@pytest.mark.parametrize(
    ("adapter", "condition", "broken"),
    [
        (lambda: Encoding(above_33, **LONG), "source <= 33", "source 34"),
        (lambda: Encoding(exactly_7, **LONG), "Eq(source, 7)", "source 2"),
        (lambda: Encoding(odd, **LONG), "Ne(Mod(source, 2), 0)", "source 2"),
        (lambda: Encoding(above_3, **LONG), "source > 3", "source 2"),
        (lambda: Encoding(wider_than_long, **LONG), "batch <= source", "batch 3 and source 2"),
        (lambda: Encoding(longer_base, **LONG), "source <= 40", "source 41"),
        (lambda: Encoding(short_table, **LONG), "Eq(source, Min(64, source))", "source 65"),
        (lambda: Stepping(many_queries, **LONG), "query <= 40", "query 41"),
        (lambda: Stepping(many_slots, **LONG), "capacity <= 40", "capacity 41"),
        (lambda: Stepping(many_rows, **LONG), "batch <= 40", "batch 41"),
        (lambda: Stepping(as_long_as_the_source, **LONG), "Ne(query, source)", "query 2 and source 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_branch_that_some_promised_size_would_take_is_refused(
    tmp_path: Path, adapter: Callable[[], Any], condition: str, broken: str
) -> None:
    made = adapter()
    lines, first = inspect.getsourcelines(made.change)
    (here,) = [i for i, line in enumerate(lines) if "# here" in line]
    with pytest.raises(ExportError) as caught:
        write_fp32_variant(made, tmp_path / "fp32")
    (problem,) = caught.value.problems
    place, _, rest = problem.partition("\n")
    assert place == f"{__file__}:{first + here}: {lines[here].strip()}"
    assert f"holds where {condition}, and not for {broken}, which the bundle would promise" in rest
    assert "torch.where" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("adapter", "limits"),
    [
        (lambda: Encoding(above_33, **LONG), (33, 100)),
        (lambda: Encoding(short_table, **LONG), (64, 100)),
        (lambda: Stepping(many_queries, **LONG), (100, 40)),
        (lambda: Encoding(above_1, **LONG), (100, 100)),
        (lambda: Stepping(fewer_slots_than_tokens, **LONG), (100, 100)),
        (lambda: Alibi(max_length=3, max_target_length=2), (3, 2)),
        (lambda: Alibi(max_length=2, max_target_length=2), (2, 1)),
        (lambda: Alibi(max_length=1, max_target_length=1), (1, 1)),
    ],
)
def test_a_branch_that_no_promised_size_takes_does_not_matter(
    tmp_path: Path, adapter: Callable[[], Any], limits: tuple[int, int]
) -> None:
    promised = Limits(max_source_length=limits[0], max_target_length=limits[1])
    write_fp32_variant(adapter(), tmp_path / "fp32", limits=promised)
    assert (tmp_path / "fp32/decoder_step.onnx").is_file()


def on_a_number(ids: Tensor, _mask: Tensor) -> Tensor:
    if (ids > 3).any():  # here
        return torch.tensor(2.0)
    return torch.tensor(1.0)


def to_a_number(_ids: Tensor, mask: Tensor) -> Tensor:
    return mask[:, : int(mask.sum(1).max())]  # here


@pytest.mark.parametrize("change", [on_a_number, to_a_number])
def test_what_cannot_be_traced_is_told_in_a_few_lines(
    tmp_path: Path, change: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    lines, first = inspect.getsourcelines(change)
    (here,) = [i for i, line in enumerate(lines) if "# here" in line]
    with pytest.raises(ExportError, match="data-dependent") as caught:
        write_fp32_variant(Encoding(change), tmp_path / "fp32")
    text = str(caught.value)
    assert text.startswith(f"{__file__}:{first + here}: {lines[here].strip()}\n  cannot become a graph: ")
    assert len(text.splitlines()) < 5
    assert capfd.readouterr().err == ""


def test_an_operator_that_onnx_lacks_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"No ONNX function found for .*bessel_j0") as caught:
        write_fp32_variant(Encoding(lambda ids, _: torch.special.bessel_j0(ids[..., None])), tmp_path / "fp32")
    assert len(str(caught.value).splitlines()) == 1


class Learned(Alibi):
    """With a table of positions for the source, and one for the target."""

    def __init__(self, source_rows: int, target_rows: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.source_positions = torch.nn.Embedding(source_rows, 21)
        self.target_positions = torch.nn.Embedding(target_rows, 7)

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        positions = torch.arange(source_ids.size(1))
        return super().encode(source_ids, source_mask) + self.source_positions(positions)

    def decode_step(self, target_ids: Tensor, positions: Tensor, *others: Any) -> Tensor:
        return super().decode_step(target_ids, positions, *others) + self.target_positions(positions)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((64, 200), ["source of 200 tokens", "it takes 64 and no more", "max_length=64", "--max-source-length 64"]),
        (
            (200, 30),
            ["target of 100 tokens", "it takes 30 and no more", "max_target_length=30", "--max-target-length 30"],
        ),
    ],
)
def test_a_table_that_is_too_short_for_what_is_promised_is_found_at_once(
    tmp_path: Path, rows: tuple[int, int], wanted: list[str], verify: bool
) -> None:
    adapter = Learned(*rows, max_length=200, max_target_length=100)
    torch.save(adapter.state_dict(), tmp_path / "model.pt")
    with pytest.raises(ExportError, match="IndexError") as caught:
        export_bundle(
            tmp_path / "model.pt", tmp_path / "bundle", settings=IDS, adapter=lambda _: adapter, verify=verify
        )
    assert all(part in str(caught.value) for part in wanted), caught.value
    assert f"{__file__}:" in caught.value.problems[0]
    assert not (tmp_path / "bundle").exists()


def test_a_table_that_is_long_enough_for_what_is_promised_passes(tmp_path: Path) -> None:
    adapter = Learned(64, 30, max_length=200, max_target_length=100)
    torch.save(adapter.state_dict(), tmp_path / "model.pt")
    sizes = {"max_source_length": 64, "max_target_length": 30}
    _, report = export_bundle(
        tmp_path / "model.pt", tmp_path / "bundle", settings=IDS, adapter=lambda _: adapter, **sizes
    )
    assert report is not None
    assert report.passed
