"""The CPUs of a process, told by fake control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfm_export.runtime import threads
from tfm_export.runtime.threads import usable_cpus


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "1600000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/cpu.max": "400000 100000"}, 4),
        # The group around it is the narrower one.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/cpu.max": "400000 100000",
                f"{V2}/a/cpu.max": "200000 100000",
            },
            2,
        ),
        # A container that sees its own group at the mount point only.
        ({"proc/self/cgroup": "0::/docker/1234\n", f"{V2}/cpu.max": "500000 100000"}, 5),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "nonsense"}, 8),
        (
            {
                "proc/self/cgroup": "12:pids:/x\n4:cpu,cpuacct:/jobs/1\n0::/\n",
                f"{V1}/jobs/1/cpu.cfs_quota_us": "600000",
                f"{V1}/jobs/1/cpu.cfs_period_us": "100000",
            },
            6,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                f"{V1}/cpu.cfs_quota_us": "-1",
                f"{V1}/cpu.cfs_period_us": "100000",
            },
            8,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/gone\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ({"proc/self/cgroup": "nonsense\n\n"}, 8),
    ],
)
def test_the_quota_of_the_control_groups(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert usable_cpus(write(tmp_path, files)) == expected


def test_affinity_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "300000 100000\n"})
    assert usable_cpus(root) == 2


def test_platforms_without_affinity_or_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cpus(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus(tmp_path) == 1


def test_this_machine() -> None:
    assert threads.usable_cpus() >= 1
