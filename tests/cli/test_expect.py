"""`--expect` of `onnx`, `inspect` and `verify` as a user types it, on a model of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.test_adapter import IDS, Alibi
from tests.checkpoints.test_adapter import load as load_alibi
from tests.cli.conftest import Invoke
from tests.once import Once
from tests.oracles.own_model import RIGHT, WORDS, own_json, own_lines, own_model, save_own
from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.errors import ParityError
from tfm_export.export import export_bundle, stage
from tfm_export.verify import parse_expectations, read_golden

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


@pytest.fixture(scope="module")
def own(once: Once) -> Path:
    """Their checkpoint, settings and pairs, and two bundles: with the right answers, and with wrong ones."""

    def make(folder: Path) -> None:
        model = own_model()
        checkpoint = save_own(model, folder)
        (folder / "pairs.tsv").write_text("\n".join(own_lines(model)) + "\n")
        (folder / "pairs.jsonl").write_text("\n".join(own_json(model)) + "\n")
        (folder / "right.json").write_text(json.dumps(RIGHT))
        pairs = parse_expectations((folder / "pairs.jsonl").read_text().splitlines(), "pairs.jsonl")
        export_bundle(checkpoint, folder / "right", settings=RIGHT, inputs=["otter"], expectations=pairs)
        export_bundle(checkpoint, folder / "wrong", settings={**RIGHT, "heads": 2}, inputs=["otter"])

    return once("own_model", make)


@pytest.fixture
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "write_fp32_variant", lambda *_, **__: pytest.fail("graphs were exported"))


@pytest.mark.usefixtures("no_graphs")
def test_nothing_is_published_where_pairs_come_out_wrong(invoke: Invoke, own: Path, tmp_path: Path) -> None:
    result = invoke("onnx", own / "own.pt", "--config", own / "right.json", "--heads", 2, "--expect", own / "pairs.tsv")
    assert result.exit_code == 3, result.output
    assert f"of {len(WORDS)} pairs do not come out as expected" in result.stderr
    assert "heads 2, " in result.stderr
    assert "layer_norm_epsilon 1e-05 (PyTorch's default)" in result.stderr
    assert "Try: --heads 6" in result.stderr
    assert [*tmp_path.iterdir()] == []


def test_pairs_that_come_out_right_join_the_golden_set(own: Path) -> None:
    bundle = Bundle.open(own / "right")
    golden = read_golden(bundle, GOLDEN)
    assert [g.text for g in golden] == [*WORDS, "otter"]
    assert bundle.manifest.golden["synthetic"] is False
    expected = [json.loads(line) for line in (own / "pairs.jsonl").read_text().splitlines()]
    for one, pair in zip(golden, expected, strict=False):
        assert [t for t in one.tokens if t != RIGHT["eos"]] == pair["tokens"]
    reading = bundle.manifest.model["reading"]
    assert (reading["pairs"], reading["with_log_probs"]) == (len(WORDS), len(WORDS))
    assert reading["answers"]["heads"] == {"value": 6, "origin": "as given"}
    report = json.loads((own / "right" / "reports" / "parity.json").read_text())["variants"][0]
    assert (report["expected"]["passed"], report["expected"]["count"]) == (True, len(WORDS))
    assert report["reading"].startswith(f"the reading is your model's on {len(WORDS)} of your own pairs")


def test_without_pairs_the_verdict_says_what_was_not_proven(invoke: Invoke, own: Path) -> None:
    shutil.copytree(own / "wrong", "wrong")
    result = invoke("verify", "wrong")
    assert result.exit_code == 0, result.output
    assert "not proven: that this reading is your model. On answers alone rest heads 2, " in result.stdout
    assert "--expect FILE" in result.stdout
    state = json.loads(invoke("verify", "wrong", "--json").stdout)
    assert "not proven" in state["variants"][0]["reading"]
    assert state["variants"][0]["expected"] is None


def test_a_bundle_is_held_to_pairs(invoke: Invoke, own: Path) -> None:
    shutil.copytree(own / "right", "right")
    result = invoke("verify", "right", "--expect", own / "pairs.jsonl")
    assert result.exit_code == 0, result.output
    assert f"your own pairs: {len(WORDS)} of {len(WORDS)} as expected, {len(WORDS)} with log-prob" in result.stdout
    lines = (own / "pairs.tsv").read_text().splitlines()
    Path("other.tsv").write_text("\n".join([*lines[:-1], lines[-1] + "A"]))
    result = invoke("verify", "right", "--expect", "other.tsv")
    assert result.exit_code == 3
    assert f"fp32: 1 of {len(WORDS)} pairs do not come out as expected" in result.stderr
    assert "--checkpoint" in result.stderr


def test_with_the_checkpoint_verify_names_the_right_answers(invoke: Invoke, own: Path) -> None:
    shutil.copytree(own / "wrong", "wrong")
    result = invoke("verify", "wrong", "--checkpoint", own / "own.pt", "--expect", own / "pairs.tsv", "--json")
    assert result.exit_code == 3
    assert "Try: --heads 6" in result.stderr
    assert json.loads(result.stdout)["variants"][0]["expected"]["passed"] is False


def test_inspect_holds_a_checkpoint_to_pairs(invoke: Invoke, own: Path) -> None:
    arguments = ("inspect", own / "own.pt", "--config", own / "right.json", "--expect", own / "pairs.tsv")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert f"your own pairs: {len(WORDS)} of {len(WORDS)} as expected" in result.stdout
    result = invoke(*arguments, "--norm-last", "--json")
    assert result.exit_code == 3
    state = json.loads(result.stdout)["expected"]
    assert (state["passed"], state["hint"]) == (False, "--norm-first")
    assert invoke("inspect", own / "right", "--expect", own / "pairs.tsv").exit_code == 2


@pytest.mark.usefixtures("no_graphs")
def test_a_file_without_pairs_is_refused_before_any_work(invoke: Invoke, own: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("cat\n")
    result = invoke("onnx", own / "own.pt", "--config", own / "right.json", "--expect", "pairs.tsv")
    assert result.exit_code == 1
    assert "pairs.tsv, line 1: expected a source, one tab and its output; found 0 tabs" in result.stderr


def test_beams_are_compared_where_a_pair_says_so(invoke: Invoke, own: Path) -> None:
    shutil.copytree(own / "right", "right")
    beams = invoke("run", "right", "--beam-size", 4, "--json", *WORDS)
    assert beams.exit_code == 0, beams.output
    found = [json.loads(line) for line in beams.stdout.splitlines()]
    pairs = [{"source": f["source"], "tokens": f["tokens"], "options": {"beam_size": 4}} for f in found]
    greedy = [json.loads(line)["tokens"] for line in (own / "pairs.jsonl").read_text().splitlines()]
    assert [pair["tokens"] for pair in pairs] != greedy, "beams tell apart from greedy search"
    Path("beams.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    assert invoke("verify", "right", "--expect", "beams.jsonl").exit_code == 0
    Path("greedy.jsonl").write_text("\n".join(json.dumps({**pair, "options": {}}) for pair in pairs))
    assert invoke("verify", "right", "--expect", "greedy.jsonl").exit_code == 3


def alibi_pairs(model: Alibi, count: int = 6) -> list[str]:
    """Pairs of ids by greedy decoding, the whole target computed anew at each step."""
    pairs = []
    for number in range(count):
        source = torch.tensor([[3 + (number * k) % 4 for k in range(1, 5)]])
        mask = torch.ones_like(source, dtype=torch.bool)
        tokens = [IDS["bos"]]
        while len(tokens) <= model.config.max_target_length and (len(tokens) == 1 or tokens[-1] != IDS["eos"]):
            with torch.no_grad():
                logits = model.decode_with_cache(torch.tensor([tokens]), model.encode(source, mask), mask)[0]
            tokens.append(int(logits[0, -1].argmax()))
        pairs.append(json.dumps({"source_ids": source[0].tolist(), "tokens": tokens[1:]}))
    return pairs


def alibi_settings(**other: Any) -> dict[str, Any]:
    return {**IDS, "source_ends_with_eos": False, **other}


def test_an_adapter_is_held_to_pairs_by_its_graphs(tmp_path: Path) -> None:
    model = Alibi().eval()
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    pairs = parse_expectations(alibi_pairs(model), "pairs")
    with pytest.raises(ParityError) as caught:
        export_bundle(
            tmp_path / "model.pt",
            tmp_path / "b",
            adapter=load_alibi,
            settings=alibi_settings(bos=4),
            expectations=pairs,
        )
    assert caught.value.hint == "--bos 1"
    assert not (tmp_path / "b").exists()
    bundle, report = export_bundle(
        tmp_path / "model.pt", tmp_path / "b", adapter=load_alibi, settings=alibi_settings(), expectations=pairs
    )
    assert report is not None
    assert report.passed
    assert bundle.manifest.model["reading"]["pairs"] == len(pairs.pairs)
