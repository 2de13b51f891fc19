"""`tfm-export generate-graph` and `onnx --generate` as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.conftest import Invoke
from tests.cli.test_onnx import quick_graphs
from tfm_export import generate_graph as stage
from tfm_export.bundle import Bundle
from tfm_export.cli import cli

__all__ = ["quick_graphs"]
FILE = "onnx/fp32/generate.onnx"


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    return tmp_path / "tfm_bundle"


def test_the_file_is_written_into_the_bundle_and_its_proof_is_told(invoke: Invoke, bundle: Path) -> None:
    result = invoke("generate-graph")
    assert result.exit_code == 0, result.output
    assert f"tfm_bundle/{FILE}: the whole greedy decode in one call, weights inside, " in result.stdout
    assert "generate.onnx, batched: 5 of 5 real inputs token for token" in result.stdout
    shown = invoke("inspect", bundle)
    assert f"{FILE} " in shown.stdout
    assert "the whole greedy decode in one call" in shown.stdout
    verified = invoke("verify")
    assert verified.exit_code == 0, verified.output
    assert "generate.onnx, padded: 5 of 5 real inputs token for token" in verified.stdout


def test_json_has_every_comparison(invoke: Invoke, bundle: Path) -> None:
    result = invoke("generate-graph", bundle, "--json")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["variants"]
    assert (report["variant"], report["passed"], len(report["generations"])) == ("fp32", True, 3)


def test_it_is_not_written_twice(invoke: Invoke, bundle: Path) -> None:
    assert invoke("generate-graph", bundle, "--variant", "auto").exit_code == 0
    result = invoke("generate-graph", bundle)
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert invoke("generate-graph", bundle, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "w8"], "has no variant 'w8'; it has fp32"),
        (["nowhere"], "nowhere is not a bundle"),
        (["--threads", "2000"], "threads must be from 1 to 1,024"),
    ],
)
@pytest.mark.usefixtures("bundle")
def test_what_cannot_be_done_is_told(invoke: Invoke, arguments: list[str], message: str) -> None:
    result = invoke("generate-graph", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_graph_that_is_wrong_ends_with_3(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = stage.build_generate_graph

    def shortened(*arguments: object, **_: object) -> object:
        return build(*arguments, max_target_length=3)

    monkeypatch.setattr(stage, "build_generate_graph", shortened)
    result = invoke("generate-graph", bundle)
    assert result.exit_code == 3
    assert "diverges at token 3" in result.stderr
    assert not (bundle / FILE).exists()


@pytest.mark.usefixtures("quick_graphs")
def test_an_export_writes_it_too(invoke: Invoke, tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = invoke("onnx", tiny_checkpoint, "--generate", "-o", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert FILE in Bundle.open(tmp_path / "b").manifest.files
    assert FILE in result.stdout
    assert "generate.onnx, alone: 16 of 16 synthetic inputs token for token" in result.stdout


@pytest.mark.usefixtures("quick_graphs")
def test_an_export_without_proof_writes_it_without(invoke: Invoke, tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = invoke("onnx", tiny_checkpoint, "--generate", "--no-verify", "--json", "-o", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert FILE in json.loads(result.stdout)["files"]
    assert not (tmp_path / "b/reports").exists()


def test_the_help_needs_none_of_the_libraries() -> None:
    result = CliRunner().invoke(cli, ["generate-graph", "--help"])
    assert "one call" in result.stdout
