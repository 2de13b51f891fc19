"""Results of benchmarks.generation as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.limits import step_floor

OURS = "tfm-export"
PEER = "CTranslate2"


def tables(results: dict[str, Any]) -> str:
    """All tables of a results file."""
    return "\n\n".join([_where(results), _speed(results), _ratios(results), _cost(results), _share(results)])


def _where(results: dict[str, Any]) -> str:
    machine, work = results["machine"], results["work"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {results['threads']} threads ({', '.join(machine['flags'])}); {machine['system']}; "
        f"Python {machine['python']}, {versions}; commit {str(machine['commit'])[:12]}"
        f"{' with changes' if machine['uncommitted_changes'] else ''}; {machine['time']}. "
        f"{work['model']}, {work['source_tokens']} source tokens, {work['target_tokens']} target tokens, "
        f"median of {results['rounds']} interleaved rounds [10th to 90th percentile]."
    )


def _speed(results: dict[str, Any]) -> str:
    rows = []
    for cell in results["cells"]:
        per_step = np.array(cell["seconds"]) / results["work"]["target_tokens"] * 1e3
        middle, low, high = np.percentile(per_step, [50, 10, 90])
        same = f"{cell['sentences_as_first_contender']} of {cell['batch']}"
        rate = cell["batch"] / middle * 1e3
        spread = f"{middle:.2f} [{low:.2f} to {high:.2f}]"
        rows.append([cell["batch"], cell["beam"], cell["contender"], spread, f"{rate:,.0f}", same])
        if cell is _last_of_its_kind(results, cell):
            floor = step_floor(results["limits"], cell["batch"] * cell["beam"]) * 1e3
            rows.append([cell["batch"], cell["beam"], "floor: a step's weights and products", f"{floor:.2f}", "", ""])
    names = ["batch", "beam", "", "ms per step, encoder included", "tokens/s", f"sentences as {OURS}"]
    return table(names, rows)


def _last_of_its_kind(results: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    kind = [c for c in results["cells"] if (c["batch"], c["beam"]) == (cell["batch"], cell["beam"])]
    last: dict[str, Any] = kind[-1]
    return last


def _ratios(results: dict[str, Any]) -> str:
    medians = {(c["batch"], c["beam"], c["contender"]): float(np.median(c["seconds"])) for c in results["cells"]}
    others = [name for name in results["contenders"] if not name.startswith(OURS)]
    ours = [name for name in results["contenders"] if name.startswith(OURS)]
    rows = [
        [batch, beam, name, *(f"{medians[batch, beam, other] / medians[batch, beam, name]:.2f}" for other in others)]
        for batch, beam in dict.fromkeys((c["batch"], c["beam"]) for c in results["cells"])
        for name in ours
    ]
    return table(["batch", "beam", "is faster", *(f"than {name} by" for name in others)], rows)


def _cost(results: dict[str, Any]) -> str:
    kinds = list(dict.fromkeys((c["batch"], c["beam"]) for c in results["cells"]))
    rows = []
    for name, loaded in results["contenders"].items():
        peaks = {(c["batch"], c["beam"]): c["peak_megabytes"] for c in results["cells"] if c["contender"] == name}
        rows.append([name, f"{loaded['load_seconds']:.1f}", f"{loaded['peak_megabytes']:,.0f}"])
        rows[-1] += [f"{peaks[kind]:,.0f}" for kind in kinds]
    after = [f"peak MB after batch {batch}, beam {beam}" for batch, beam in kinds]
    return table(["", "load s", "peak MB after loading", *after], rows)


def _share(results: dict[str, Any]) -> str:
    limits = results["limits"]
    text = (
        f"Limits measured in the same run: {limits['read_bytes_per_second'] / 1e9:.1f} GB/s read, "
        f"{limits['flops'] / 1e9:.0f} GFLOPS in float32 matrix products."
    )
    if results["python_share"]:
        share = np.median([one["python_share"] for one in results["python_share"]])
        text += f" Outside ONNX Runtime, a greedy step at batch 1 spends {share:.1%} of its time."
    return text


def table(names: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Markdown."""
    lines = [[str(name) for name in names], *([str(value) for value in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
