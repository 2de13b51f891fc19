"""The work of `tfm-export run`: lines in, lines out, whatever becomes of them."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click
import numpy as np

from tfm_export.cli.heat_map import draw_attention
from tfm_export.cli.json_lines import parse_request, source_of
from tfm_export.cli.progress import ProgressBar
from tfm_export.decoding import Reason
from tfm_export.errors import RequestError, TfmExportError

if TYPE_CHECKING:
    from tfm_export.decoding import Hypothesis, SettledToken
    from tfm_export.model import Generation, Model, Stream


OnBadLine = Literal["stop", "skip", "empty"]
BREAKS = {ord(character): " " for character in "\r\n"}


@dataclass(frozen=True)
class DecodedLine:
    """A line that could be decoded.

    Attributes:
        number: of the line, from 1 on.
        line: as it was read.
        answer: its hypotheses.
    """

    number: int
    line: str
    answer: Generation


class Job:
    """Decodes lines and prints what comes out: what belongs to line n of the input is line n of the output.

    Attributes:
        done: lines read and answered, well or not.
        failed: those that could not be decoded.
        late: those that ended at their deadline.
        over_budget: the budget ended before the lines did; the output ends with the last line that was decoded.
        last: the last one that could.

    Args:
        model: what decodes.
        call: settings of every line.
        ids: lines are ids.
        as_json: lines of output are objects.
        numbered: each line of output has the number of its source.
        on_error: what becomes of a line that cannot be decoded: "empty" gives an empty line, "skip" none, "stop" ends
            the job.
        budget: seconds from now on for all lines together.
        done: lines that an earlier run has answered.
        json_input: lines are objects, as `json_lines` reads them.
    """

    def __init__(
        self,
        *,
        model: Model,
        call: dict[str, Any],
        ids: bool,
        as_json: bool,
        numbered: bool,
        on_error: OnBadLine = "empty",
        budget: float | None = None,
        done: int = 0,
        json_input: bool = False,
    ) -> None:
        self._json_input = json_input
        self._ends = None if budget is None else time.perf_counter() + budget
        self._model, self._call, self._on_error = model, call, on_error
        self._ids, self._as_json, self._numbered = ids, as_json, numbered
        self.done = done
        self.failed = self.late = 0
        self.over_budget = False
        self.last: DecodedLine | None = None

    def run(self, lines: Iterator[str], out: TextIO, progress: ProgressBar, *, window: int, workers: int = 1) -> None:
        """Decode lines, `window` at a time, by so many workers, and print them in order."""
        read, shown = itertools.tee(lines)  # they are never further apart than two windows
        for line, answer in zip(shown, self._answers(read, window, workers), strict=False):
            if self._ends_here(answer):
                break
            self.done += 1
            tokens, window_ends = 0, self.done % window == 0
            if isinstance(answer, TfmExportError):
                progress.clear()
                self._fail(answer, line, out)
            else:
                self.last = DecodedLine(self.done, line, answer)
                out.writelines(text + "\n" for text in self._texts(self.last))
                tokens = sum(len(hypothesis.tokens) for hypothesis in answer.hypotheses)
                if answer.source_truncated and not self._as_json:
                    progress.clear()
                    self._tell_of_truncation()
            if window_ends:
                out.flush()
            progress.advance(line, tokens, pause=window_ends)
        out.flush()
        progress.finish()

    def stream(self, lines: Iterable[str], out: TextIO) -> None:
        """Decode line after line and print their tokens as they come."""
        for line in lines:
            self.done += 1
            begun = False
            try:
                for text in self._pieces(line):
                    out.write(one_line(text))
                    out.flush()
                    begun = True
            except TfmExportError as problem:
                if begun:
                    out.write("\n")
                self._fail(problem, line, out, begun=begun)
            else:
                out.write("\n")
            if self.over_budget:
                self.done -= 1  # this one is cut short
                break
        out.flush()

    def _answers(self, lines: Iterable[str], window: int, workers: int) -> Iterator[Generation | TfmExportError]:
        model, many = self._model, {"window": window, "workers": workers, **self._settings()}
        if self._ids:
            ids = map(parse_ids, lines)
            return model.generate_ids_iterable(ids, on_error="yield", **many)
        if self._json_input:
            return model.generate_iterable(map(parse_request, lines), on_error="yield", **many)
        return model.generate_iterable(lines, on_error="yield", **many)

    def _pieces(self, line: str) -> Iterator[str]:
        pieces: Stream[SettledToken]
        if self._ids:
            pieces = self._model.stream_ids(parse_ids(line), **self._settings())
            yield from (f"{' ' if number else ''}{token.token}" for number, token in enumerate(pieces))
        else:
            asked = parse_request(line) if self._json_input else line
            if isinstance(asked, RequestError):
                raise asked
            pieces = texts = self._model.stream(asked, **self._settings())
            yield from (piece.text for piece in texts)
        if pieces.answer is not None:
            self._ends_here(pieces.answer)
            if pieces.answer.source_truncated:
                self._tell_of_truncation()

    def _settings(self) -> dict[str, Any]:
        """Of a call that is made now."""
        budget = None if self._ends is None else max(0.0, self._ends - time.perf_counter())
        return {**self._call, "budget": budget}

    def _ends_here(self, answer: Generation | TfmExportError) -> bool:
        """Whether an answer is not whole because the budget is over; and count those that are late."""
        reason = None if isinstance(answer, TfmExportError) else answer.reason
        self.late += reason is Reason.DEADLINE
        self.over_budget = reason is Reason.BUDGET
        return self.over_budget

    def _texts(self, decoded: DecodedLine) -> Iterator[str]:
        """The lines of output for a line of input."""
        if self._as_json:
            yield json.dumps(self._state(decoded), ensure_ascii=False)
            return
        answer = decoded.answer
        texts = answer.texts or [" ".join(map(str, hypothesis.tokens)) for hypothesis in answer.hypotheses]
        for text, hypothesis in zip(map(one_line, texts), answer.hypotheses, strict=True):
            yield f"{decoded.number}\t{hypothesis.rank:.4f}\t{text}" if self._numbered else text

    def _state(self, decoded: DecodedLine) -> dict[str, Any]:
        answer = decoded.answer
        states = [
            {**({} if answer.texts is None else {"text": answer.texts[place]}), **hypothesis_state(hypothesis)}
            for place, hypothesis in enumerate(answer.hypotheses)
        ]
        state = self._source_state(decoded.line)
        state |= {**states[0], "reason": answer.reason.value, "source_truncated": answer.source_truncated}
        return {**state, **({"hypotheses": states} if self._numbered else {})}

    def _source_state(self, line: str) -> dict[str, Any]:
        if self._ids:
            return {"line": self.done, "source_ids": parse_ids(line)}
        return {"line": self.done, "source": source_of(line) if self._json_input else line}

    def _fail(self, problem: TfmExportError, line: str, out: TextIO, *, begun: bool = False) -> None:
        """Tell of a line that could not be decoded, and write what stands in its place, if its line is not begun."""
        if self._on_error == "stop":
            raise RequestError([f"line {self.done}: {text}" for text in problem.problems], problem.hint)
        self.failed += 1
        click.echo(f"line {self.done}: {problem}", err=True)
        if self._on_error == "skip" or begun:
            return
        state = {**self._source_state(printable(line)), "error": str(problem)}
        empty = f"{self.done}\t\t" if self._numbered else ""
        out.write((json.dumps(state, ensure_ascii=False) if self._as_json else empty) + "\n")

    def _tell_of_truncation(self) -> None:
        limit = self._model.step_model.limits.max_source_length
        click.echo(f"line {self.done}: the source was cut to the {limit} tokens that the model takes", err=True)


def one_line(text: str) -> str:
    """A text whose line breaks have become spaces: a line of output is one text."""
    return text.translate(BREAKS)


def printable(line: str) -> str:
    """A line without the bytes that are not UTF-8, which no output can hold."""
    return line.encode(errors="surrogateescape").decode(errors="replace")


def hypothesis_state(hypothesis: Hypothesis) -> dict[str, Any]:
    """A hypothesis as JSON has it; what was not asked for is left out."""
    state: dict[str, Any] = {
        "tokens": hypothesis.tokens,
        "score": hypothesis.score,
        "finished": hypothesis.finished,
        "log_probs": hypothesis.log_probs,
    }
    arrays = {"attention": hypothesis.attention, "distributions": hypothesis.distributions}
    state |= {
        name: None if array is None else np.round(array.astype(np.float64), 6).tolist()
        for name, array in arrays.items()
    }
    return {name: value for name, value in state.items() if value is not None}


def parse_ids(line: str) -> list[Any]:
    """The ids of a line; words that are none stay words, for the model to refuse."""
    most = sys.int_info.default_max_str_digits  # Python takes no longer word for a number
    return [int(w) if w.removeprefix("-").isdecimal() and len(w) <= most else w for w in line.split()]


def draw(path: Path, model: Model, decoded: DecodedLine, call: dict[str, Any], *, ids: bool) -> None:
    """Draw what the best hypothesis of a line attends to; `call` tells how its text was read."""
    best = decoded.answer.hypotheses[0]
    assert best.attention is not None
    if not best.tokens:
        raise RequestError("the target is empty: there is nothing to draw")
    line, long_source = decoded.line, call["long_source"]
    source = [
        *(model.check_ids(parse_ids(line), long_source=long_source) if ids else model.encode_text(line, **call)).ids
    ]
    names = model.tokenizer
    source_names = names.source_tokens(source) if names else [*map(str, source)]
    target_names = names.target_tokens(best.tokens) if names else [*map(str, best.tokens)]
    draw_attention(path, best.attention, source_names, target_names)
