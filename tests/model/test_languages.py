"""Languages of a call and of single texts, through a model: what the encoder gets, what the decoder begins with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tfm_export
from tests.once import Once
from tfm_export import RequestError, TextRequest
from tfm_export.bundle import Bundle
from tfm_export.cli import cli
from tfm_export.model import Model
from tfm_export.tokenizer import FILE

NAMES = {"source": {"q": "__en__", "j": "__fr__"}, "target": {"p20": "__fr__", "p21": "__de__"}}


def renamed(tiny_bundle: Path, folder: Path, names: dict[str, dict[str, str]]) -> Path:
    """A bundle with other tokens in some places."""
    import shutil

    path = shutil.copytree(tiny_bundle, folder / "tfm_bundle")
    state = json.loads((path / FILE).read_text())
    for side, others in names.items():
        state[side]["tokens"] = [others.get(token, token) for token in state[side]["tokens"]]
    (path / FILE).write_text(json.dumps(state))
    bundle = Bundle.open(path, check_hashes=False, unchecked="tokenizer")
    bundle.add_files({FILE: "renamed"})
    bundle.save()
    return path


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, once: Once) -> Path:
    return once("multilingual_bundle", lambda folder: renamed(tiny_bundle, folder, NAMES)) / "tfm_bundle"


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with tfm_export.load(bundle) as loaded:
        yield loaded


def ids_of(model: Model, side: str, token: str) -> int:
    tokens: Any = json.loads((model.bundle.path / FILE).read_text())[side]["tokens"]
    return int(tokens.index(token))


def test_a_source_and_a_target_language(model: Model) -> None:
    english, french = ids_of(model, "source", "__en__"), ids_of(model, "target", "__fr__")
    plain = model.encode_text("hello").ids
    source = model.encode_text("hello", source_language="en")
    assert [*source.ids] == [english, *plain]
    answer = model.generate("hello", source_language="en", target_language="fr")
    by_ids = model.generate_ids([[english, *plain]], forced_bos=french)[0]
    assert answer.hypotheses == by_ids.hypotheses
    assert answer.tokens[0] == french
    assert model.generate("hello", forced_bos="__fr__").tokens == model.generate("hello", forced_bos=french).tokens
    assert model.decode_options(forced_bos="fr").forced_bos == french


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_size": 3, "num_hypotheses": 2},
        {"beam_size": 3, "length_formula": "without_prefix", "compatibility": "huggingface"},
        {"sampling_topk": 4, "seed": 3},
        {"return_alternatives": True, "num_hypotheses": 3},
        {"compatibility": "huggingface", "repetition_penalty": 1.3},
    ],
)
def test_every_text_may_have_its_own(model: Model, fields: dict[str, Any]) -> None:
    """In one batch: each as the same call with the token forced."""
    french, german = (ids_of(model, "target", token) for token in ("__fr__", "__de__"))
    texts: list[str | TextRequest] = [
        "hello",
        TextRequest(text="hello", target_language="de"),
        TextRequest(text="hello", source_language="fr", target_language="__fr__"),
    ]
    answers = model.generate(texts, target_language="fr", **fields)
    alone = [model.generate("hello", forced_bos=i, **fields) for i in (french, german)]
    assert [h.tokens for h in answers[0].hypotheses] == [h.tokens for h in alone[0].hypotheses]
    assert [h.tokens for h in answers[1].hypotheses] == [h.tokens for h in alone[1].hypotheses]
    assert [h.score for h in answers[1].hypotheses] == pytest.approx([h.score for h in alone[1].hypotheses], abs=1e-3)
    expected = model.generate(TextRequest(text="hello", source_language="fr"), forced_bos=french, **fields)
    assert answers[2].tokens == expected.tokens


def test_a_prefix_follows_the_language(model: Model) -> None:
    german, prefix = ids_of(model, "target", "__de__"), model.decode_options(target_prefix="p1 p2").target_prefix
    answer = model.generate("hello", target_language="de", target_prefix="p1 p2")
    assert answer.tokens[:3] == [german, *prefix]
    wished = model.generate("hello", target_language="de", target_prefix="p1", prefix_bias_beta=0.99, beam_size=2)
    assert wished.tokens[:2] == [german, prefix[0]]
    pieces = list(model.stream("hello", target_language="de"))
    assert pieces[0].token == german


def test_a_decoder_that_starts_from_the_language(tiny_bundle: Path, tmp_path: Path) -> None:
    names = {"source": {"q": "[en_XX]"}, "target": {"p20": "[ro_RO]"}}
    with tfm_export.load(renamed(tiny_bundle, tmp_path, names)) as model:
        english, romanian = ids_of(model, "source", "[en_XX]"), ids_of(model, "target", "[ro_RO]")
        ids = [*model.encode_text("hello").ids, english]
        for fields in ({}, {"compatibility": "huggingface", "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}):
            answer = model.generate("hello", source_language="en_XX", target_language="ro_RO", **fields)
            expected = model.generate_ids([ids], start_tokens=[romanian], **fields)[0]
            assert answer.tokens == expected.tokens
            assert answer.score == pytest.approx(expected.score, abs=1e-3)


def test_what_cannot_be_is_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="target_language 'dee' is none of the model's 2 languages") as caught:
        model.generate("hello", target_language="dee")
    assert caught.value.hint == "de"
    with pytest.raises(RequestError, match="target_language 'frz' is none"):
        model.generate("hello", forced_bos="frz")
    with pytest.raises(RequestError, match="source_language: ids are exactly what the encoder gets"):
        model.generate_ids([[4, 2]], source_language="en")
    with pytest.raises(RequestError, match="special_tokens must be one of read, escape, found 'drop'"):
        model.generate("hello", special_tokens="drop")
    with pytest.raises(RequestError, match="special_tokens must be one of"):
        tfm_export.load(model.bundle.path, special_tokens="drop")  # type: ignore[arg-type]


def test_special_tokens_are_escaped_for_a_call_or_for_all(
    model: Model, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    encode = model.tokenizer.encode_source  # type: ignore[union-attr]
    with tfm_export.load(bundle, special_tokens="escape") as careful:
        for one in (model, careful):
            monkeypatch.setattr(
                one.tokenizer, "encode_source", lambda text, reading: read.append(reading.escape) or encode(text)
            )
            for settings in ({}, {"special_tokens": "escape"}, {"special_tokens": "read"}):
                one.generate("hello", **settings)
                one.encode_text("hello", **settings)
    assert read == [False, False, True, True, False, False, True, True, True, True, False, False]


def run(*arguments: str | Path, lines: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", *map(str, arguments)], input=lines)


def test_languages_on_the_command_line(model: Model, bundle: Path) -> None:
    expected = [model.generate("hello", source_language="en", target_language=name).text for name in ("fr", "de")]
    flags = ("--source-language", "en", "--target-language", "fr")
    assert run(bundle, "hello", *flags).stdout == expected[0] + "\n"
    assert run(bundle, "hello", "--source-language", "en", "--forced-bos", "__de__").stdout == expected[1] + "\n"
    refused = run(bundle, "hello", "--target-language", "fra")
    assert (refused.exit_code, refused.stdout) == (1, "\n")
    assert "target_language 'fra' is none of the model's 2 languages\nTry: fr" in refused.stderr


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_objects_as_lines(model: Model, bundle: Path, stream: list[str]) -> None:
    german = model.generate("hello", target_language="de").text
    prefixed = model.generate("zz", target_language="fr", target_prefix="p1").text
    lines = [
        {"text": "hello", "target_language": "de"},
        {"text": "zz", "target_prefix": "p1"},
        {"text": "zz", "language": "de"},
        {"source": "zz"},
        {"text": 3},
        {"text": "zz", "deadline": "soon"},
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines) + "zz\n"
    result = run(bundle, "--json-input", "--target-language", "fr", *stream, lines=content)
    assert result.exit_code == 1
    assert result.stdout == f"{german}\n{prefixed}\n\n\n\n\n\n"
    errors = [line for line in result.stderr.splitlines() if line.startswith("line ")]
    assert [error.split(": ")[0] for error in errors] == [f"line {n}" for n in range(3, 8)]
    assert "the line has language; known are text, source_language" in errors[0]
    assert "no object with a text" in errors[1]
    assert "a text must be a str, found int" in errors[2]
    assert "deadline must be a number of seconds" in errors[3]
    assert "the line is not JSON" in errors[4]
    if not stream:
        state = json.loads(run(bundle, "--json-input", "--json", lines='{"text": "hello"}\n').stdout)
        assert (state["source"], state["text"]) == ("hello", model.generate("hello").text)
    assert run(bundle, "--json-input", "--ids", lines=content).exit_code == 2
