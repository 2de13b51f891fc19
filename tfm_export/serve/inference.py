"""What a model answers: tensors for the Open Inference Protocol, objects and events for Triton's generate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding import Reason
from tfm_export.model import Generation, TextRequest
from tfm_export.quotation import quote
from tfm_export.serve.limits import Refusal, RequestLimits
from tfm_export.serve.parameters import request_settings
from tfm_export.serve.served import Version
from tfm_export.serve.tensors import InferRequest

TEXT, IDS, LENGTHS = "text_input", "input_ids", "input_lengths"


def metadata(version: Version, versions: Sequence[str]) -> dict[str, Any]:
    """A model's inputs and outputs, as the protocol tells them."""
    inputs = [
        {"name": IDS, "datatype": "INT64", "shape": [-1, -1]},
        {"name": LENGTHS, "datatype": "INT64", "shape": [-1]},
    ]
    outputs = [
        {"name": "output_ids", "datatype": "INT64", "shape": [-1, -1, -1]},
        {"name": "output_lengths", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "scores", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "reasons", "datatype": "BYTES", "shape": [-1]},
    ]
    if version.model.tokenizer is not None:
        inputs = [{"name": TEXT, "datatype": "BYTES", "shape": [-1]}]
        outputs.insert(0, {"name": "text_output", "datatype": "BYTES", "shape": [-1, -1]})
    return {
        "name": version.name,
        "versions": list(versions),
        "platform": "tfm_export",
        "inputs": inputs,
        "outputs": outputs,
    }


async def infer(version: Version, request: InferRequest, limits: RequestLimits) -> dict[str, NDArray[Any]]:
    """Decode the sources of an inference request.

    Returns:
        Arrays by the names of `metadata`; N sources, H hypotheses, at most T tokens. Where a source has fewer
        hypotheses, texts are empty, lengths 0 and scores NaN; ids beyond a length are 0.

    Raises:
        Refusal: it cannot be served, or not in time.
        TfmExportError: as `Model.generate_async` says.
    """
    settings, priority = request_settings(request.parameters, limits)
    model, identifier = version.model, request.identifier
    texts, ids = _sources(request, limits)
    if texts is not None:
        asked = [TextRequest(text=text, priority=priority) for text in texts] if priority else texts
        pending = model.generate_async(asked, request_id=identifier, **settings)
    else:
        pending = model.generate_ids_async(ids, request_id=identifier, **settings)
    answers = await pending
    if answers and all(a.reason is Reason.DEADLINE and a.score is None for a in answers):
        raise Refusal(504, ["the time was over before decoding began"])
    return _arrays(answers)


def _sources(request: InferRequest, limits: RequestLimits) -> tuple[list[str] | None, list[list[int]]]:
    """The texts of a request, or the ids."""
    inputs = dict(request.inputs)
    texts, ids, lengths = inputs.pop(TEXT, None), inputs.pop(IDS, None), inputs.pop(LENGTHS, None)
    problems = [f"there is no input {quote(name)}" for name in inputs]
    if (texts is None) == (ids is None):
        problems.append(f"there must be an input {TEXT} (BYTES) or {IDS} (INT64)")
    for name, array, kind in ((TEXT, texts, object), (IDS, ids, np.int64), (LENGTHS, lengths, np.int64)):
        if array is not None and array.dtype != kind and not (kind == np.int64 and array.dtype == np.int32):
            problems.append(f"{name} must be {'BYTES' if kind is object else 'INT64'}")
    count = texts.size if texts is not None else 0 if ids is None else len(ids)
    if count > limits.texts:
        problems.append(f"a request has at most {limits.texts} sources, found {count}")
    if ids is not None and ids.ndim != 2:
        problems.append(f"{IDS} must have two axes, sources and tokens, found {list(ids.shape)}")
    elif ids is not None and lengths is not None:
        flat = lengths.reshape(-1)
        if len(flat) != len(ids) or ((flat < 1) | (flat > ids.shape[1])).any():
            problems.append(f"{LENGTHS} must give each of {len(ids)} sources a length from 1 to {ids.shape[1]}")
    if problems:
        raise Refusal(400, problems)
    if texts is not None:
        return texts.reshape(-1).tolist(), []
    assert ids is not None
    ends = [ids.shape[1]] * len(ids) if lengths is None else lengths.reshape(-1).tolist()
    return None, [row[:end] for row, end in zip(ids.tolist(), ends, strict=True)]


def _arrays(answers: Sequence[Generation]) -> dict[str, NDArray[Any]]:
    width = max((len(a.hypotheses) for a in answers), default=0)
    longest = max((len(h.tokens) for a in answers for h in a.hypotheses), default=0)
    shape = len(answers), width
    ids, lengths = np.zeros((*shape, longest), np.int64), np.zeros(shape, np.int64)
    scores, texts = np.full(shape, np.nan, np.float32), np.full(shape, "", object)
    for n, answer in enumerate(answers):
        for h, hypothesis in enumerate(answer.hypotheses):
            ids[n, h, : len(hypothesis.tokens)], lengths[n, h] = hypothesis.tokens, len(hypothesis.tokens)
            if hypothesis.score is not None:
                scores[n, h] = hypothesis.score
            if answer.texts is not None:
                texts[n, h] = answer.texts[h]
    outputs: dict[str, NDArray[Any]] = {"text_output": texts} if answers and answers[0].texts is not None else {}
    reasons = np.array([answer.reason.value for answer in answers], object)
    return outputs | {"output_ids": ids, "output_lengths": lengths, "scores": scores, "reasons": reasons}


# Triton's generate: one text, one object.


def _text_and_settings(state: dict[str, Any], limits: RequestLimits) -> tuple[TextRequest, dict[str, Any], str]:
    text, parameters = state.get("text_input"), state.get("parameters", {})
    problems = [
        f"there is no field {quote(name)}" for name in state if name not in {TEXT, "parameters", "id", "stream"}
    ]
    if not isinstance(text, str):
        problems.append(f"text_input must be a string, found {quote(text)}")
    if not isinstance(parameters, dict):
        problems.append(f"parameters must be an object, found {quote(parameters)}")
    if problems:
        raise Refusal(400, problems)
    assert isinstance(text, str)
    settings, priority = request_settings(parameters, limits)
    identifier = state.get("id", "")
    return TextRequest(text=text, priority=priority), settings, identifier if isinstance(identifier, str) else ""


def _told(version: Version, answer: Generation, text: str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "model_name": version.name,
        "model_version": version.number,
        "text_output": text,
        "score": answer.score,
        "reason": answer.reason.value,
    }
    if answer.texts is not None and len(answer.texts) > 1:
        told["hypotheses"] = [
            {"text_output": one, "score": hypothesis.score}
            for one, hypothesis in zip(answer.texts, answer.hypotheses, strict=True)
        ]
    return told


async def generate(version: Version, state: dict[str, Any], limits: RequestLimits) -> dict[str, Any]:
    """Decode one text.

    Raises:
        Refusal: it cannot be served, or not in time.
        TfmExportError: as `Model.generate_async` says.
    """
    request, settings, identifier = _text_and_settings(state, limits)
    answer = await version.model.generate_async(request, request_id=identifier, **settings)
    if answer.reason is Reason.DEADLINE and answer.score is None:
        raise Refusal(504, ["the time was over before decoding began"])
    return _told(version, answer, answer.text)


async def generate_stream(
    version: Version, state: dict[str, Any], limits: RequestLimits
) -> AsyncIterator[dict[str, Any]]:
    """Decode one text and give it in pieces; the last object has the score and the reason, and no text.

    Raises:
        Refusal: it cannot be served.
        TfmExportError: as `Model.stream_async` says.
    """
    request, settings, identifier = _text_and_settings(state, limits)
    stream = version.model.stream_async(request, request_id=identifier, **settings)
    names = {"model_name": version.name, "model_version": version.number}
    try:
        async for piece in stream:
            if piece.text:
                yield {**names, "text_output": piece.text}
        assert stream.answer is not None
        yield _told(version, stream.answer, "")
    finally:
        await asyncio.shield(stream.aclose())


def event(state: dict[str, Any]) -> bytes:
    """An object as a server-sent event."""
    return b"data: " + json.dumps(state, ensure_ascii=False).encode() + b"\n\n"
