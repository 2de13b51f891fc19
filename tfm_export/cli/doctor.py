"""`tfm-export doctor`: what this machine has, what is broken, and what of a bundle runs here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from tfm_export.bundle import DEFAULT_PATH, MANIFEST
from tfm_export.cli.options import json_option
from tfm_export.cli.reports import size_text, table
from tfm_export.json_text import write_json

SECONDS = 60.0  # for all probes; the first call of CUDA on a machine with many GPUs takes some
PROBES = ("machine", "gpus", "packages", "cuda_python", "onnxruntime", "tensorrt", "tensorrt_rtx")
Findings = dict[str, dict[str, Any]]


@click.command("doctor")
@click.argument("bundle", metavar="[BUNDLE]", type=click.Path(path_type=Path), required=False)
@json_option
@click.pass_context
def command(context: click.Context, bundle: Path | None, as_json: bool) -> None:
    """Show what this machine can run bundles with, what is broken, and which parts of a BUNDLE run here.

    The default for BUNDLE is ./tfm_bundle, if it exists. Every library is tried in a separate process, so that a broken
    library does not stop the others.

    \b
    Example:
      tfm-export doctor my_bundle --json

    Ends with exit code 1 if packages conflict, if the bundle cannot be read, or if no part of it runs here.
    """
    if bundle is None and (DEFAULT_PATH / MANIFEST).is_file():
        bundle = DEFAULT_PATH
    findings = examine(bundle)
    if as_json:
        click.echo(write_json(findings, indent=2))
    else:
        print_findings(findings, bundle)
    if complaints(findings):
        context.exit(1)


def examine(bundle: Path | None) -> Findings:
    """What every probe of `tfm_export.runtime.probes` finds, by name.

    Args:
        bundle: what to look for ways to run of; None for none.
    """
    commands = {name: [name] for name in PROBES}
    if bundle is not None:
        commands["bundle"] = ["bundle", str(bundle)]
    started = {name: _start(arguments) for name, arguments in commands.items()}
    found = {name: _finish(process) for name, process in started.items()}
    if bundle is not None:
        found["bundle"] = {"path": str(bundle), **found["bundle"]}
    return found


def complaints(findings: Findings) -> list[str]:
    """What keeps things from working that should work, each as a sentence."""
    problems = list(findings["packages"].get("clashes", []))
    bundle = findings.get("bundle", {})
    if bundle.get("problem"):
        problems.append(str(bundle["problem"]))
    elif bundle and bundle["taken"] is None:
        problems.append(f"nothing of {bundle['path']} runs here")
    return problems


def _start(arguments: list[str]) -> subprocess.Popen[str] | OSError:
    # -P: a folder named like a library, where the user happens to be, is not that library.
    command = [sys.executable, "-P", "-m", "tfm_export.runtime.probes", *arguments]
    try:
        return subprocess.Popen(  # noqa: S603 (this program itself)
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
    except OSError as problem:
        return problem


def _finish(process: subprocess.Popen[str] | OSError) -> dict[str, Any]:
    """What a probe printed, or {"problem": ...} with how it ended instead."""
    if isinstance(process, OSError):
        return {"problem": f"Python cannot be started: {process}"}
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"problem": f"no answer within {SECONDS:.0f} seconds"}
    try:
        found: dict[str, Any] = json.loads(output)
    except ValueError:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        return {"problem": f"the process that looked {_end(process.returncode)}: {last}"}
    return found


def _end(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def print_findings(findings: Findings, bundle: Path | None) -> None:
    """Everything, for people."""
    click.echo(table([["machine", ""], *_machine_rows(findings["machine"])]))
    click.echo("\n" + table([["GPU", ""], *_gpu_rows(findings["gpus"])]))
    click.echo("\n" + table([["to run bundles with", ""], *_library_rows(findings)]))
    click.echo("\n" + table([["package", "version", "for the extra", ""], *_package_rows(findings["packages"])]))
    if bundle is not None and "ways" in findings["bundle"]:
        click.echo("\n" + table([[str(bundle), "runs here"], *_way_rows(findings["bundle"])]))
    for complaint in complaints(findings):
        click.echo(f"\n{click.style('✗', fg='red')} {complaint}")


def _machine_rows(found: dict[str, Any]) -> list[list[str]]:
    if problem := found.get("problem"):
        return [["unknown", problem]]
    sets = ", ".join(found["instruction_sets"]) or "none of those that matter"
    if found["saturates"]:
        sets += "; without VNNI, so int8 variants made here have weights of 7 bits, and those of 8 bits are slow"
    return [
        ["system", found["system"]],
        ["Python", found["python"]],
        ["tfm-export", found["tfm_export"] or "not installed as a package"],
        ["processor", found["processor"]],
        ["instruction sets", sets],
        ["CPUs", f"{found['usable_cpus']} of {found['cpus']} may be used"],
    ]


def _gpu_rows(found: dict[str, Any]) -> list[list[str]]:
    rows = [
        [
            f"{gpu['index']}",
            f"{gpu['name']}, compute capability {gpu['compute_capability']}, {size_text(gpu['memory_bytes'])}",
        ]
        for gpu in found.get("devices", [])
    ]
    if "cuda" in found:
        rows.append(["driver", f"{found['driver'] or 'of unknown release'}, for CUDA up to {found['cuda']}"])
    return rows + ([["none", found["problem"]]] if "problem" in found else [])


def _library_rows(findings: Findings) -> list[list[str]]:
    runtime = findings["onnxruntime"]
    cuda = runtime.get("cuda", runtime)
    usable = "usable" if not cuda.get("problem") else f"no: {_text(cuda)}"
    rows = [["ONNX Runtime on CPUs", runtime.get("version") or f"no: {_text(runtime)}"]]
    rows.append(["ONNX Runtime on GPUs", usable])
    use = "" if findings["gpus"].get("devices") else ", which builds engines here but needs a GPU to run them"
    for name, probe in (("TensorRT", "tensorrt"), ("TensorRT-RTX", "tensorrt_rtx")):
        library = findings[probe]
        rows.append([name, f"no: {_text(library)}" if library.get("problem") else library["version"] + use])
    reach = findings["cuda_python"]
    rows.append(["CUDA from Python", f"no: {_text(reach)}" if reach.get("problem") else f"for CUDA {reach['version']}"])
    return rows


def _package_rows(found: dict[str, Any]) -> list[list[str]]:
    if problem := found.get("problem"):
        return [["unknown", "", "", problem]]
    return [
        [package["name"], package["version"] or "-", ", ".join(package["extras"]), package["problem"] or ""]
        for package in found["packages"]
    ]


def _way_rows(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for way in found["ways"]:
        here = f"no: {_text(way)}" if way["problem"] else "yes"
        here += ", and load takes it" if way["text"] == found["taken"] else ""
        rows.append([way["text"], f"{here}; {way['note']}" if way["note"] else here])
    return rows


def _text(found: dict[str, Any]) -> str:
    """A problem, and what to try."""
    return f"{found['problem']} (try: {found['hint']})" if found.get("hint") else str(found["problem"])
