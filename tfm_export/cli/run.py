"""`tfm-export run`: decode texts from the command line, from a file or from standard input."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

import click

import tfm_export
from tfm_export.bundle import DEFAULT_PATH, MANIFEST
from tfm_export.cli.decoding_options import decoding_fields, decoding_options, flag
from tfm_export.cli.files import file_bytes, is_special, output_file, partial_path, refuse_to_replace
from tfm_export.cli.heat_map import FORMATS
from tfm_export.cli.job import Job, OnBadLine, draw
from tfm_export.cli.options import (
    backend_option,
    device_option,
    draft_option,
    force_option,
    json_option,
    threads_option,
    variant_option,
)
from tfm_export.cli.progress import ProgressBar
from tfm_export.cli.resume import begin_output, run_record
from tfm_export.errors import BundleError, RequestError
from tfm_export.extras import require
from tfm_export.quotation import shorten
from tfm_export.runtime.threads import MOST_THREADS, usable_cpus
from tfm_export.text_files import read_lines

if TYPE_CHECKING:
    from tfm_export.model import LongSource, Model
    from tfm_export.runtime.backends import Backend

OVER_BUDGET = 4  # an exit code
BATCHES_AT_ONCE = 4  # more sort better by length, fewer show results and progress earlier
# An argument that is meant as a path, though nothing is there: one word with a separator, or with a usual ending.
PATH_LIKE = re.compile(r"^\S*([/\\]\S*|_bundle|\.(txt|tsv|csv|jsonl?|pt|pth|bin|npz|onnx|safetensors))$|^~\S*$")
OF_TEXTS = ("long_source", "source_language", "target_language", "special_tokens")
OF_CALLS = ("deadline", *OF_TEXTS)
RECORDED = ("ids", "as_json", "json_input", "on_error", *OF_CALLS)  # what changes an output, beside the options
JSON_ONLY = ("return_attention", "return_logits_vocab", "return_scores")  # there is no room for them in a line of text


@click.command("run")
@click.argument("arguments", metavar="[BUNDLE] [TEXT]...", nargs=-1)
@click.option(
    "--bundle", type=click.Path(path_type=Path), help="The bundle; with this option, every argument is a text."
)
@click.option(
    "--inputs", "input_file", type=click.File("rb"), help="The file of texts, one per line.  [default: stdin]"
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write. It appears when it is complete; until then, and if the command is interrupted, the output "
    "so far is in FILE.partial.  [default: stdout]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the FILE.partial of an earlier run, after its last complete line. Refused if the input, the "
    "bundle or the options are not the same. Needs --inputs and --output.",
)
@force_option
@click.option("--ids", is_flag=True, help="Texts and targets are ids, separated by spaces.")
@click.option(
    "--long-source",
    type=click.Choice(["refuse", "truncate"]),
    default="refuse",
    show_default=True,
    help="What to do with sources that are longer than the model takes.",
)
@click.option(
    "--json-input",
    is_flag=True,
    help='Lines are objects: {"text": ..., "source_language": ..., "target_language": ..., "target_prefix": ..., '
    '"seed": ..., "deadline": ..., "priority": ...}; all but text may be left out.',
)
@click.option("--source-language", help="The language of the texts, by name (fra_Latn, fr) or token (__fr__).")
@click.option("--target-language", help="The language to translate to, for multilingual models.")
@click.option(
    "--special-tokens",
    type=click.Choice(["read", "escape"]),
    default="read",
    show_default=True,
    help="What becomes of special tokens, such as </s>, that texts spell: read them as the tokenizer's own library "
    "does, or escape them, so that they are text; a public service should escape them.",
)
@click.option("--stream", is_flag=True, help="Print tokens as soon as they can no longer change, text after text.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0),
    help="Seconds after which the search for a text ends with the result so far. They count from the moment when the "
    "text joins a batch, without the time that it waits for other texts.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    help="Seconds after which the whole command ends, with the lines that are complete by then, a message and exit "
    f"code {OVER_BUDGET}. They count from the moment when the bundle is loaded.",
)
@click.option(
    "--on-error",
    type=click.Choice(["empty", "skip", "stop"]),
    default="empty",
    show_default=True,
    help="What to print for a line that cannot be decoded: an empty line (with --json an object with its error), or "
    "nothing; or end there.",
)
@click.option(
    "--attention",
    "picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the attention weights of each target token of one TEXT, as .png, .svg or .pdf. Needs the extra plot.",
)
@decoding_options
@backend_option
@device_option
@variant_option
@draft_option
@threads_option
@click.option(
    "--workers",
    type=click.IntRange(1, MOST_THREADS),
    help="Batches decoded at once, each with --threads threads.  [default: for files on a CPU, one per CPU, with one "
    "thread each; otherwise 1]",
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    arguments: tuple[str, ...],
    bundle: Path | None,
    input_file: BinaryIO | None,
    output: Path | None,
    force: bool,
    ids: bool,
    long_source: LongSource,  # noqa: ARG001 (these settings of calls are taken from the context)
    stream: bool,
    deadline: float | None,  # noqa: ARG001
    source_language: str | None,  # noqa: ARG001
    target_language: str | None,  # noqa: ARG001
    special_tokens: str,  # noqa: ARG001
    budget: float | None,
    on_error: OnBadLine,
    resume: bool,
    json_input: bool,
    picture: Path | None,
    backend: Backend,
    device: str | None,
    variant: str | None,
    draft: str | None,
    threads: int | None,
    workers: int | None,
    as_json: bool,
    **decoding: Any,
) -> None:
    """Decode TEXTs, or the lines of a file or of standard input, and print the results in order, one per line.

    The first argument is the BUNDLE if it is a folder with a bundle; otherwise it is a text like the others, and
    ./tfm_bundle is the bundle. Arguments that name a file or a folder are refused, and so is a first argument that
    looks like a path (one word with a slash, or with an ending such as .txt or _bundle) where there is nothing: with
    --bundle, every argument is a text. Line n of the output belongs to line n of the input. A line that cannot be
    decoded is reported on standard error with its number; its line of output is empty, and the exit code is 1. A line
    break in a target is printed as a space, except with --json. Files may be of any size. With several hypotheses, each
    line of output has the number of the source text, the score and the target text, separated by tabs.

    \b
    Example:
      tfm-export run "some text" --beam-size 4 --n-best 2
      tfm-export run my_bundle --json < lines.txt > results.jsonl
      tfm-export run my_bundle --inputs lines.txt --output targets.txt
      tfm-export run "some text" --beam-size 1 --draft w8
      tfm-export run "some text" --attention alignment.png
    """
    path, texts = split_arguments(arguments, bundle)
    fields = decoding_fields(decoding, targets_are_ids=ids)
    _check_usage(
        fields,
        texts=texts,
        given=input_file,
        stream=stream,
        as_json=as_json,
        picture=picture,
        ids=ids,
        as_objects=json_input,
    )
    _check_bundle(path, texts)
    if resume:
        _check_resume(output, input_file, stream=stream, on_error=on_error)
    refuse_to_replace(output, picture, force=force)
    _check_streams(output, input_file, needs_input=not texts)
    if picture is not None:
        require("matplotlib", extra="plot")
        fields["return_attention"] = True
    file = None if texts else input_file or sys.stdin.buffer
    from_terminal = file is not None and file.isatty()
    several = not (file is None or from_terminal or stream)
    with ExitStack() as stack:
        loaded = tfm_export.load(
            path,
            backend=backend,
            device=device,
            variant=variant,
            draft=draft,
            threads=threads or (1 if several else None),
        )
        model = stack.enter_context(loaded)
        workers = (workers or _idle_cpus(model)) if several else 1
        if not ids and model.tokenizer is None:
            raise RequestError(f"{path} has no tokenizer: it takes ids, not text", "--ids")
        options = model.decode_options(**fields)
        if draft is not None and options.beam_size > 1:
            raise click.UsageError(f"--draft guesses for one beam, and there are {options.beam_size}: --beam-size 1")
        call = {name: context.params[name] for name in OF_CALLS} | {"options": options}
        numbered = options.num_hypotheses > 1
        done, record = 0, None
        if _is_file(input_file):
            told = {name: context.params[name] for name in RECORDED}
            record = run_record(path, Path(input_file.name), options, {**told, "backend": model.backend})
        if output is not None and not is_special(output):
            numbers = numbered and not as_json
            done = begin_output(partial_path(output), record, resume=resume, numbered=numbers)
        job = Job(
            model=model,
            call=call,
            ids=ids,
            as_json=as_json,
            numbered=numbered,
            on_error=on_error,
            budget=budget,
            done=done,
            json_input=json_input,
        )
        lines = iter(texts) if file is None else read_lines(file)
        deque(islice(lines, done), maxlen=0)
        to_terminal = output is None and sys.stdout.isatty()
        total = None if file is None else file_bytes(file)
        progress = ProgressBar(total, enabled=not (file is None or stream or from_terminal or to_terminal))
        out = stack.enter_context(output_file(output, append=done > 0, is_whole=lambda: not job.over_budget))
        if stream:
            job.stream(lines, out)
        else:
            batch = options.max_batch_size if options.batch_type == "examples" else 32
            window = 1 if from_terminal else BATCHES_AT_ONCE * batch * workers
            job.run(lines, out, progress, window=window, workers=workers)
        if picture is not None and job.last is not None:
            draw(picture, model, job.last, {name: context.params[name] for name in OF_TEXTS}, ids=ids)
    context.exit(_exit_code(job, done, budget))


def _is_file(given: BinaryIO | None) -> TypeGuard[BinaryIO]:
    """Whether lines come from a file, which can be read again, and not from a pipe or standard input."""
    return given is not None and os.path.isfile(given.name)


def _check_resume(output: Path | None, given: BinaryIO | None, *, stream: bool, on_error: OnBadLine) -> None:
    """Refuse to go on with what does not tell how far it is."""
    if not _is_file(given) or output is None or is_special(output) or stream or on_error == "skip":
        raise click.UsageError("--resume needs --inputs and --output, of files, without --stream and --on-error skip")


def _exit_code(job: Job, before: int, budget: float | None) -> int:
    """Tell what did not go well, and what the command exits with.

    Args:
        job: all of it.
        before: lines that an earlier run has answered.
        budget: in seconds.
    """
    if job.late:
        click.echo(f"{job.late:,} lines ended at their deadline, with what they had by then", err=True)
    if job.failed:
        click.echo(f"{job.failed:,} of {job.done - before:,} lines could not be decoded", err=True)
    if job.over_budget:
        click.echo(f"the budget of {budget:g} s is over: {job.done:,} lines are done", err=True)
        return OVER_BUDGET
    return 1 if job.failed else 0


def _idle_cpus(model: Model) -> int:
    """How many workers keep the CPUs busy that a batch leaves idle; 1 on a GPU, which works for one at a time."""
    threads = model.step_model.capabilities.threads
    return 1 if threads is None else max(1, usable_cpus() // threads)


def split_arguments(arguments: Sequence[str], bundle: Path | None) -> tuple[Path, Sequence[str]]:
    """Which argument is the bundle, and which are texts.

    Raises:
        RequestError: one that would be a text is a file or a folder.
        BundleError: the first looks like a path, and nothing is there.
    """
    if bundle is not None:
        return bundle, arguments
    if arguments and _is_bundle(arguments[0]):
        path, texts = Path(arguments[0]), arguments[1:]
    else:
        path, texts = DEFAULT_PATH, arguments
    if problems := [problem for text in texts if (problem := _path_problem(text))]:
        raise RequestError(
            problems, f'--inputs FILE for the lines of a file; --bundle {path} "TEXT" where a text is meant'
        )
    if arguments and texts is arguments and PATH_LIKE.search(arguments[0]):
        hint = f'the path of a bundle; --bundle {path} "TEXT" where a text is meant'
        raise BundleError(f"there is no bundle {shorten(arguments[0])}", hint)
    return path, texts


def _check_bundle(path: Path, texts: Sequence[str]) -> None:
    """Say of which argument there is no bundle, if there is none."""
    if path == DEFAULT_PATH and texts and not _is_bundle(str(path)):
        raise BundleError(
            f"there is no bundle {shorten(texts[0])}, and {path} is not a bundle that could decode it as a text",
            "the path of a bundle; tfm-export onnx CHECKPOINT makes one",
        )


def _is_bundle(argument: str) -> bool:
    return os.path.isfile(os.path.join(argument, MANIFEST))  # a text may be too long for a path


def _path_problem(text: str) -> str | None:
    """What an argument is that names something on the disk; None for a text."""
    if not os.path.exists(text):
        return None
    what = "a bundle too" if _is_bundle(text) else "a folder without bundle.json" if os.path.isdir(text) else "a file"
    return f"{shorten(text)} is {what}: it is not decoded as a text"


def _check_streams(output: Path | None, given: BinaryIO | None, *, needs_input: bool) -> None:
    """Refuse to write over what is being read, and to use what the shell has closed."""
    partial = output and partial_path(output)
    if partial and given and os.path.exists(partial) and os.path.samestat(os.fstat(given.fileno()), partial.stat()):
        raise RequestError(f"{partial} is read, and would be written to", "another file with -o")
    if needs_input and given is None and sys.stdin is None:
        raise RequestError("standard input is closed", "TEXTs, or --inputs FILE")
    if output is None and sys.stdout is None:
        raise RequestError("standard output is closed", "-o FILE")


def _check_usage(
    fields: dict[str, Any],
    *,
    texts: Sequence[str],
    given: BinaryIO | None,
    stream: bool,
    as_json: bool,
    picture: Path | None,
    ids: bool,
    as_objects: bool,
) -> None:
    """Refuse what contradicts itself, or would have no effect."""
    if texts and given is not None:
        raise click.UsageError("give TEXTs or --inputs, not both")
    if as_objects and (ids or picture is not None):
        raise click.UsageError("--json-input has texts: give it without --ids and --attention")
    if stream and as_json:
        raise click.UsageError("--stream prints text as it comes; --json prints whole objects")
    if stream and fields.get("num_hypotheses", 1) > 1:
        raise click.UsageError("--stream prints one hypothesis; --num-hypotheses wants several")
    if unseen := [flag(name) for name in JSON_ONLY if fields.get(name) and not as_json]:
        raise click.UsageError(f"{', '.join(unseen)} shows in the output of --json only")
    if picture is not None and picture.suffix not in FORMATS:
        raise click.UsageError(f"--attention draws {', '.join(FORMATS)}, found {picture.name}")
    if picture is not None and (len(texts) != 1 or stream):
        raise click.UsageError("--attention draws one sentence: give one TEXT, without --stream")
