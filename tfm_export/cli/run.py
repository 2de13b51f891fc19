"""`tfm-export run`: decode texts from the command line or from standard input."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tfm_export
from tfm_export.bundle import DEFAULT_PATH, MANIFEST
from tfm_export.cli.options import json_option, threads_option
from tfm_export.errors import NumericError, RequestError, TfmExportError

if TYPE_CHECKING:
    from tfm_export.decoding import DecodeOptions, Result
    from tfm_export.model import Model, Source

BATCHES_AT_ONCE = 4  # with some in reserve, sentences that finish early are replaced


@dataclass(frozen=True)
class Line:
    """A line of input.

    Attributes:
        number: from 1 on.
        content: as it was read; bytes, since they may not be text.
    """

    number: int
    content: bytes

    def text(self) -> str:
        """The line as text.

        Raises:
            RequestError: it is not UTF-8.
        """
        try:
            return self.content.decode()
        except UnicodeDecodeError as problem:
            raise RequestError(f"it is not text in UTF-8: {problem}") from None


@click.command("run")
@click.argument("arguments", metavar="[BUNDLE] [TEXT]...", nargs=-1)
@click.option("--bundle", type=click.Path(path_type=Path), help="The bundle; then every argument is a text.")
@click.option("--ids", is_flag=True, help="Numbers in, numbers out: a source is its ids, separated by spaces.")
@click.option("--max-length", type=click.IntRange(min=1), help="Longest target in tokens, end token included.")
@click.option(
    "--long-source",
    type=click.Choice(["refuse", "truncate"]),
    default="refuse",
    show_default=True,
    help="What to do with sources that are longer than the model takes.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Texts decoded at the same time."
)
@threads_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    arguments: tuple[str, ...],
    bundle: Path | None,
    ids: bool,
    max_length: int | None,
    long_source: str,
    batch_size: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Decode TEXTs, or the lines of standard input, and print what comes out, a line each, in order.

    The first argument is the BUNDLE if it is a folder that holds one; otherwise it is a text like the others and
    ./tfm_bundle is the bundle. A line that cannot be decoded is reported on standard error with its number, the others
    are printed all the same, and the exit code is 1.

    \b
    Example:
      tfm-export run "some text"
      tfm-export run my_bundle --json < lines.txt > results.jsonl
    """
    path, texts = split_arguments(arguments, bundle)
    with tfm_export.load(path, threads=threads) as model:
        if not ids and model.tokenizer is None:
            raise RequestError(f"{path} has no tokenizer: it takes ids, not text", "--ids")
        fields: dict[str, Any] = {} if max_length is None else {"max_decoding_length": max_length}
        options = model.decode_options(max_batch_size=batch_size, **fields)
        printer = Printer(model=model, options=options, long_source=long_source, ids=ids, as_json=as_json)
        lines = _argument_lines(texts) if texts else _stdin_lines()
        at_once = 1 if not texts and sys.stdin.isatty() else batch_size * BATCHES_AT_ONCE
        while chunk := list(itertools.islice(lines, at_once)):
            printer.print_chunk(chunk)
        printer.finish()
    if printer.failed:
        context.exit(1)


def split_arguments(arguments: Sequence[str], bundle: Path | None) -> tuple[Path, Sequence[str]]:
    """Which argument is the bundle, and which are texts."""
    if bundle is not None:
        return bundle, arguments
    if arguments and (Path(arguments[0]) / MANIFEST).is_file():
        return Path(arguments[0]), arguments[1:]
    return DEFAULT_PATH, arguments


class Printer:
    """Decodes chunks of lines and prints the results.

    Attributes:
        failed: lines that could not be decoded.
    """

    def __init__(self, *, model: Model, options: DecodeOptions, long_source: str, ids: bool, as_json: bool) -> None:
        self._model, self._options, self._long_source = model, options, long_source
        self._ids, self._as_json = ids, as_json
        self.done = self.failed = 0
        self._start = time.perf_counter()
        self._shows_progress = sys.stderr.isatty() and not sys.stdin.isatty() and not sys.stdout.isatty()

    def print_chunk(self, chunk: Sequence[Line]) -> None:
        """Decode some lines together and print what came out, in order."""
        sources: dict[Line, Source] = {}
        problems: dict[Line, TfmExportError] = {}
        for line in chunk:
            try:
                sources[line] = self._source(line)
            except RequestError as problem:
                problems[line] = problem
        results = self._decode(sources, problems)
        for line in chunk:
            if line in results:
                self._print(line, sources[line], results[line])
            else:
                self._report(line, str(problems[line]))
        sys.stdout.flush()
        self.done += len(chunk)
        self.failed += len(problems)
        if self._shows_progress:
            rate = self.done / (time.perf_counter() - self._start)
            click.echo(f"\r{self.done:,} lines, {rate:,.0f} a second ", nl=False, err=True)

    def finish(self) -> None:
        """Say how it went."""
        if self._shows_progress:
            click.echo(err=True)
        if self.failed:
            click.echo(f"{self.failed:,} of {self.done:,} lines could not be decoded", err=True)

    def _source(self, line: Line) -> Source:
        long_source: Any = self._long_source
        if not self._ids:
            return self._model.encode_text(line.text(), long_source=long_source)
        try:
            ids = [int(word) for word in line.text().split()]
        except ValueError as problem:
            raise RequestError(f"ids must be integers: {problem}") from None
        return self._model.check_ids(ids, long_source=long_source)

    def _decode(self, sources: dict[Line, Source], problems: dict[Line, TfmExportError]) -> dict[Line, Result]:
        """Decode together; where that fails for a number that is not finite, one by one, to find whose it is."""
        try:
            results = self._model.generate_ids([source.ids for source in sources.values()], options=self._options)
            return dict(zip(sources, results, strict=True))
        except NumericError as problem:
            if len(sources) == 1:
                problems[next(iter(sources))] = problem
                return {}
        alone = [self._decode({line: source}, problems) for line, source in sources.items()]
        return {line: result for results in alone for line, result in results.items()}

    def _print(self, line: Line, source: Source, result: Result) -> None:
        best = result.hypotheses[0]
        text = None if self._model.tokenizer is None or self._ids else self._model.tokenizer.decode_target(best.tokens)
        if self._as_json:
            given = {"source_ids": source.ids} if self._ids else {"source": line.text()}
            state = {
                "line": line.number,
                **given,
                **({} if text is None else {"text": text}),
                "tokens": best.tokens,
                "score": best.score,
                "source_truncated": source.truncated,
            }
            click.echo(json.dumps(state, ensure_ascii=False))
            return
        click.echo(" ".join(map(str, best.tokens)) if text is None else text)
        if source.truncated:
            self._report(line, f"the source was cut to the {len(source.ids)} tokens that the model takes")

    def _report(self, line: Line, problem: str) -> None:
        if self._shows_progress:
            click.echo("\r", nl=False, err=True)
        click.echo(f"line {line.number}: {problem}", err=True)


def _argument_lines(texts: Sequence[str]) -> Iterator[Line]:
    for number, text in enumerate(texts, 1):
        yield Line(number, text.encode(errors="surrogateescape"))


def _stdin_lines() -> Iterator[Line]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield Line(number, line.rstrip(b"\r\n"))
