"""NVIDIA's tritonclient, as it is, against the server: the oracle for its protocol."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import tfm_export
from tests import skips
from tests.serve.conftest import Running

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/tritonclient/bin/python"


@skips.skip_if(not PYTHON.exists(), "NVIDIA's tritonclient", "make tritonclient")
def test_tritonclient_works_as_it_is(server: Running, tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle) as model:
        source = model.encode_text("ab").ids
        script = Path(__file__).with_name("triton_client.py")
        command = [PYTHON, script, server.address.removeprefix("http://"), json.dumps(source)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        beams, greedy = model.generate(["hello", "zz"], beam_size=2), model.generate(["hello", "zz"])
        assert found["bytes"] == [answer.text for answer in beams]
        assert found["scores"] == pytest.approx([answer.score for answer in beams], abs=1e-4)
        assert found["compressed"] == found["async"] == [answer.text for answer in greedy]
        assert found["ids"] == model.generate_ids([source])[0].tokens
    assert (found["live"], found["ready"], found["model"], found["metadata"]) == (True, True, True, "tiny")
    assert found["index"] == [{"name": "tiny", "version": "1", "state": "READY"}]
    assert found["problem"] == ["400", "beam_size must be at least 1, found 0"]
