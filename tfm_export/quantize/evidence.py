"""What a variant is calibrated on and judged by: real inputs, and what fp32 makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfm_export.bundle import GOLDEN, Bundle, Manifest
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import BundleError, RequestError
from tfm_export.precision import FLOATS
from tfm_export.progress import Progress
from tfm_export.quantize.calibration import CalibrationSample, decode_samples
from tfm_export.quantize.metrics import METRICS, Development, Metric
from tfm_export.quantize.options import QuantizeOptions
from tfm_export.quantize.report import MetricComparison
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.step_model import StepModel
from tfm_export.tokenizer import Tokenizer, load_tokenizer
from tfm_export.tokenizer.sources import encode_sources
from tfm_export.verify import BeamGolden, Golden, read_golden

MOST_CALIBRATED = 512  # sources; more of them move no threshold that matters
MOST_JUDGED = 200
BEAM_SIZE = 4
MOST_PADDED, MOST_PADDING = 64, 16  # samples with padding, and its tokens: they set ranges, which have headroom


@dataclass(frozen=True)
class DevelopmentScore:
    """fp32's score on a development file, to compare others with.

    Attributes:
        metric: how targets are scored.
        development: the file.
        sources: its sources in ids.
        score: of fp32.
        decode: sources with a model -> their targets.
    """

    metric: Metric
    development: Development
    sources: list[list[int]]
    score: float
    decode: Callable[[StepModel, list[list[int]]], list[str]]

    def compare(self, model: StepModel, limit: float) -> MetricComparison:
        """Score another model.

        Args:
            model: the variant.
            limit: points that it may lose.
        """
        score = self.metric.score(self.decode(model, self.sources), self.development.references)
        return MetricComparison(
            name=self.metric.name,
            sources=len(self.sources),
            fp32=self.score,
            variant=score,
            loss=self.metric.loss(self.score, score),
            limit=limit,
        )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Real inputs.

    Attributes:
        samples: what fp32's decoder reads for them: to calibrate on.
        golden: inputs with fp32's generations: to judge by; empty if there are none that are real.
        facts: how they were decoded, where it is not what the manifest says of the bundle's own golden inputs.
        metric: fp32's score on the development file; None without one.
        notes: what people should know of them.
    """

    samples: list[CalibrationSample]
    golden: list[Golden]
    facts: dict[str, Any] = field(default_factory=dict)
    metric: DevelopmentScore | None = None
    notes: list[str] = field(default_factory=list)


def gather_evidence(bundle: Bundle, precision: str, options: QuantizeOptions, progress: Progress) -> Evidence:
    """Collect real inputs and decode them with fp32.

    Args:
        bundle: an open bundle.
        precision: of the variant to come.
        options: with the user's texts.
        progress: told what begins.

    Raises:
        RequestError: there are none, or a text that the model cannot take.
        BundleError: the bundle has no golden inputs.
    """
    manifest = bundle.manifest
    if GOLDEN not in manifest.files:
        raise BundleError(f"{bundle.path} has no {GOLDEN}", "export the bundle again")
    tokenizer = load_tokenizer(bundle)
    golden, facts, notes = read_golden(bundle, GOLDEN), {}, []
    sources = [g.source_ids for g in golden]
    texts = None if options.calibration is None else _encode(options.calibration, tokenizer, bundle, "calibration")
    development = options.development
    if development is not None and tokenizer is None:
        raise RequestError(
            f"{bundle.path} has no tokenizer, so a development file's targets cannot be told from its texts"
        )
    development_sources = (
        None if development is None else _encode(development.sources, tokenizer, bundle, "development")
    )
    model = OnnxModel(bundle, threads=options.threads)
    try:
        if texts is not None:
            sources = texts
            if manifest.golden["synthetic"]:
                sources, judged = _split(texts)
                progress(f"decoding {len(judged)} inputs to judge by with fp32")
                golden, facts = _decode_golden(model, judged, bundle), {"synthetic": False}
                notes.append(f"judged by {len(judged)} of the calibration texts: the golden inputs are random ids")
        elif manifest.golden["synthetic"]:
            if not (options.unproven and precision in FLOATS):
                raise RequestError(
                    f"the golden inputs of {bundle.path} are random ids: they say nothing of its quality",
                    "--calibration FILE with real source texts, or tfm-export onnx CHECKPOINT --inputs FILE",
                )
            golden = []
            notes.append("NOT JUDGED: the golden inputs are random ids; --calibration FILE gives real ones")
        sources = sources[:: max(1, len(sources) // MOST_CALIBRATED)][:MOST_CALIBRATED]
        progress(f"decoding {len(sources)} inputs with fp32")
        samples = decode_samples(
            bundle, sources, max_length=manifest.golden["max_length"], threads=options.threads, progress=progress
        )
        metric = None
        if development_sources is not None:
            metric = _score(model, bundle, tokenizer, development_sources, options, progress)
    finally:
        model.close()
    return Evidence(samples=samples, golden=golden, facts=facts, metric=metric, notes=notes)


def padded_samples(samples: Sequence[CalibrationSample], manifest: Manifest) -> list[CalibrationSample]:
    """Some of the samples with padding behind their sources, as batches have it.

    Args:
        samples: of real inputs.
        manifest: with the padding's id and the longest source.
    """
    room = manifest.limits.max_source_length
    pads = [manifest.special_ids.for_sources.pad] * MOST_PADDING
    return [CalibrationSample([*t.source_ids, *pads][:room], t.target_ids) for t in samples[:MOST_PADDED]]


def _encode(texts: Sequence[str], tokenizer: Tokenizer | None, bundle: Bundle, what: str) -> list[list[int]]:
    if not texts:
        raise RequestError(f"there are no {what} texts", "real source texts, one a line")
    return encode_sources(texts, tokenizer, bundle.manifest, what=f"{what} text")


def _split(sources: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Sources to calibrate on and others to judge by; the same where there are too few."""
    judged = sources[1::2][:MOST_JUDGED]
    if len(judged) < 20:
        return sources, sources[:MOST_JUDGED]
    taken = set(range(1, 2 * len(judged), 2))
    return [s for i, s in enumerate(sources) if i not in taken], judged


def _decode_golden(model: StepModel, sources: list[list[int]], bundle: Bundle) -> list[Golden]:
    """Golden inputs whose truth is the fp32 variant, which was held to PyTorch when the bundle was made."""
    facts, special = bundle.manifest.golden, bundle.manifest.special_ids
    options = DecodeOptions(max_decoding_length=facts["max_length"], return_end_token=True)
    beam = replace(options, beam_size=BEAM_SIZE, length_penalty=facts["length_penalty"])
    pairs = zip(
        sources, generate(model, sources, options, special), generate(model, sources, beam, special), strict=True
    )
    golden = []
    for source, greedy, searched in pairs:
        tokens, best = greedy.hypotheses[0].tokens, searched.hypotheses[0]
        golden.append(
            Golden(
                text=None,
                source_ids=source,
                tokens=tokens,
                log_probs=[],
                margins=[math.inf] * len(tokens),
                beam=BeamGolden(tokens=best.tokens, score=best.rank),
            )
        )
    return golden


def _score(
    model: StepModel,
    bundle: Bundle,
    tokenizer: Tokenizer | None,
    sources: list[list[int]],
    options: QuantizeOptions,
    progress: Progress,
) -> DevelopmentScore:
    """fp32's score on the development file, decoded as the bundle decodes unless told otherwise."""
    development, metric, generation = options.development, METRICS[options.metric], bundle.manifest.generation
    assert development is not None
    assert tokenizer is not None  # it has encoded the sources
    decode_options = DecodeOptions(
        max_decoding_length=generation.max_length,
        beam_size=generation.beam_size,
        length_penalty=generation.length_penalty,
    )

    def decode(model: StepModel, sources: list[list[int]]) -> list[str]:
        results = generate(model, sources, decode_options, bundle.manifest.special_ids)
        return [tokenizer.decode_target(result.hypotheses[0].tokens) for result in results]

    progress(f"decoding {len(sources):,} sources of the development file with fp32")
    score = metric.score(decode(model, sources), development.references)
    return DevelopmentScore(metric, development, sources, score, decode)
