"""How near right computations come to the limits of verification, over random models and several arithmetics.

    python -m benchmarks.rounding --models 200
    MKL_CBWR=COMPATIBLE python -m benchmarks.rounding --reuse
    ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 python -m benchmarks.rounding --reuse

Each is exported; its graphs in float64 are held to PyTorch in float64, and ONNX Runtime (with one and two threads, and
with fewer of its optimisations) and PyTorch in float32 to the graphs in float64. None of them is wrong, so a share of a
limit that comes near 1 is a false alarm in the making.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.command import new_parser, write_results
from reference_model import Transformer, TransformerConfig, load_checkpoint, save_checkpoint
from reference_model.checkpoint import Checkpoint, GenerationDefaults, SpecialIds
from tfm_export.bundle import Bundle, Limits, Manifest
from tfm_export.bundle import GenerationDefaults as BundleDefaults
from tfm_export.bundle import SpecialIds as BundleIds
from tfm_export.export.variant import dimensions_of, write_fp32_variant
from tfm_export.precision import TIMES_ROUNDING
from tfm_export.runtime.cpu import onnx_runtime
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.verify.float64 import Float64Model
from tfm_export.verify.reference import float64_reference, run_reference
from tfm_export.verify.steps import TeacherForcing, Trace, compare_steps, distances, teacher_forcing

MODELS = Path("build/benchmarks/rounding")
RESULTS = Path("build/benchmarks/rounding.json")
LENGTH = 48
LEVELS = {"as a service runs it": None, "no optimisation": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC"}


def random_checkpoint(seed: int) -> Checkpoint:
    """A model of random sizes and scales: sharp attention, large embeddings, weights of mixed sizes, or none of it."""
    chance = random.Random(seed)
    pre_norm, positions = chance.random() < 0.5, chance.choice(["sinusoidal", "sinusoidal", "learned", "relative"])
    heads, head_size = chance.choice([1, 2, 3, 4, 8]), chance.choice([4, 6, 12, 16, 32])
    shared = chance.random() < 0.3
    source = chance.randint(10, 300)
    config = TransformerConfig(
        source_vocabulary_size=source,
        target_vocabulary_size=source if shared else chance.randint(10, 600),
        d_model=heads * head_size * (2 if heads * head_size % 2 else 1),
        heads=heads,
        d_ff=chance.choice([16, 100, 512]),
        encoder_layers=chance.randint(1, 6),
        decoder_layers=chance.randint(1, 6),
        activation=chance.choice(["relu", "gelu", "gelu_tanh", "silu"]),
        gated_feed_forward=chance.random() < 0.2,
        norm_first=pre_norm,
        final_norm=pre_norm or chance.random() < 0.3,
        norm=chance.choice(["layer", "layer", "layer", "rms", "unbiased"]),
        layer_norm_epsilon=chance.choice([1e-5, 1e-6, 1e-3]),
        positions=positions,
        relative_buckets=8,
        relative_max_distance=20,
        max_length=LENGTH,
        embedding_norm=chance.random() < 0.2,
        scale_embeddings=chance.random() < 0.7,
        scale_attention=chance.random() < 0.9,
        share_embeddings=shared,
        tie_projection=chance.random() < 0.3,
    )
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    sharp, large = chance.choice([1, 1, 3, 10]), chance.choice([1, 1, 5, 30])
    mixed = chance.random() < 0.3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith(("W_q.weight", "W_k.weight")):
                parameter.mul_(sharp)
            if "embedding" in name and parameter.dim() == 2:
                parameter.mul_(large)
            if mixed:
                parameter.mul_(10 ** chance.uniform(-1.5, 1.0))
    return Checkpoint(
        model=model,
        source_vocabulary=None,
        target_vocabulary=None,
        special_ids=SpecialIds(),
        generation=GenerationDefaults(max_length=20),
        training={"sharp": sharp, "large": large, "mixed": mixed},
    )


def exported(seed: int) -> tuple[Transformer, Bundle]:
    """A random model and its graphs; made once."""
    folder = MODELS / str(seed)
    if not (folder / "model.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)  # what was interrupted
        checkpoint = random_checkpoint(seed)
        write_fp32_variant(checkpoint.model, folder / "onnx" / "fp32")
        save_checkpoint(checkpoint, folder / "model.pt")
    model = load_checkpoint(folder / "model.pt").model
    manifest = Manifest(
        dimensions=dimensions_of(model),
        limits=Limits(max_source_length=LENGTH, max_target_length=LENGTH),
        special_ids=BundleIds(**vars(SpecialIds())),
        generation=BundleDefaults(max_length=20),
        variants={"fp32": {}},
    )
    bundle = Bundle(folder, manifest)
    bundle.add_files({str(file.relative_to(folder)): "a random model's" for file in folder.rglob("onnx/fp32/*")})
    return model, bundle


def runtimes(bundle: Bundle) -> Iterator[tuple[str, OnnxModel]]:
    """ONNX Runtime in several ways."""
    options = onnx_runtime.session_options
    for name, level in LEVELS.items():
        for threads in (1, 2):

            def changed(*args: Any, level: str | None = level, **kwargs: Any) -> Any:
                found = options(*args, **kwargs)
                if level is not None:
                    found.graph_optimization_level = getattr(onnx_runtime.onnxruntime.GraphOptimizationLevel, level)
                return found

            with (
                mock.patch.object(onnx_runtime, "session_options", changed),
                closing(OnnxModel(bundle, threads=threads)) as model,
            ):
                yield f"{name}, {threads} thread{'s' * (threads > 1)}", model


def float32_trace(model: Transformer, case: TeacherForcing) -> Trace:
    """What PyTorch gives in float32."""
    source_ids, source_mask = torch.from_numpy(case.source_ids), torch.from_numpy(case.source_mask)
    run = run_reference(model, source_ids, source_mask, torch.from_numpy(case.target_ids), case.places.tolist())
    visible = case.source_mask[:, None, :, None]
    tensors = {n: np.where(visible, x, 0) if n.startswith("cross") else x for n, x in run.keys_values.items()}
    return {"log_probs": run.log_probs, **tensors}


def shares(seed: int) -> dict[str, float]:
    """The largest part of a limit that anything of a model takes, by what was judged."""
    model, bundle = exported(seed)
    dimensions, limits, folder = bundle.manifest.dimensions, bundle.manifest.limits, bundle.variant_path("fp32")
    cases = [case for _, case in teacher_forcing(dimensions, limits, [], bundle.manifest.special_ids.bos)]
    reference, exact = float64_reference(model, folder), Float64Model.read(folder, dimensions)
    truths = [case.trace(exact, dimensions) for case in cases]
    judged = compare_steps(folder, dimensions, (("", case) for case in cases), reference=reference)
    found = {"graph": max(comparison.share for comparison in judged.graph)}

    def judge(name: str, traces: Iterable[Trace]) -> None:
        errors = [distances(trace, truth) for trace, truth in zip(traces, truths, strict=True)]
        shares = (error / (TIMES_ROUNDING * judged.rounding[name]) for each in errors for name, error in each.items())
        found[name] = max(shares)

    for name, runtime in runtimes(bundle):
        judge(f"ONNX Runtime, {name}", (case.trace(runtime, dimensions) for case in cases))
    judge("PyTorch, float32", (float32_trace(model, case) for case in cases))
    return found


def main() -> None:
    """Measure and print the largest shares."""
    parser = new_parser(__doc__, RESULTS)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first model's number")
    arguments = parser.parse_args()
    results: dict[int, dict[str, float]] = {}
    for seed in range(arguments.first, arguments.first + arguments.models):
        results[seed] = shares(seed)
        print(seed, f"{max(results[seed].values()):.3f}", file=sys.stderr, flush=True)
    write_results({"shares": results}, arguments.output)
    for kind in next(iter(results.values())):
        worst = max(results, key=lambda seed: results[seed][kind])
        print(f"{kind}: at most {results[worst][kind]:.3f} of the limit (model {worst})")


if __name__ == "__main__":
    main()
