"""Arguments and options that several commands share, as decorators, so that they mean the same everywhere."""

from __future__ import annotations

from pathlib import Path

import click

from tfm_export.bundle import DEFAULT_PATH

bundle_argument = click.argument(
    "bundle", metavar="[BUNDLE]", type=click.Path(path_type=Path), default=DEFAULT_PATH, required=False
)
"""The bundle to work on: `bundle: Path`, ./tfm_bundle if none is given."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of human-readable text.")
"""`as_json: bool`."""

force_option = click.option("--force", is_flag=True, help="Replace existing output.")
"""`force: bool`."""

threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="Number of threads.  [default: the CPUs this process may use]"
)
"""`threads: int | None`; None leaves the number to the runtime."""

variant_option = click.option(
    "--variant",
    help="The precision, one of those that inspect lists; auto is the fastest that was made for a CPU.  [default: "
    "fp32, or that of the TensorRT engine]",
)
"""`variant: str | None`."""

draft_option = click.option(
    "--draft",
    help="Another precision, which guesses the next tokens in greedy search and sampling: the same output in less "
    "time, for up to 4 texts at once on a CPU.  [default: none]",
)
"""`draft: str | None`."""

backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "onnxruntime", "tensorrt"]),
    default="auto",
    show_default=True,
    help="The backend that decodes; auto uses a TensorRT engine if one runs here, else ONNX Runtime.",
)
"""`backend: Backend`."""

device_option = click.option(
    "--device", help="cpu, or the number of a GPU.  [default: the first GPU that can be used, else the CPU]"
)
"""`device: str | None`."""

generate_without_option = click.option(
    "--generate-without",
    metavar="KEY",
    multiple=True,
    help="A decoding default of the bundle, such as forced_bos, that generate.onnx may leave out; can be repeated.",
)
