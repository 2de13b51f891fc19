"""How many CPUs this process may use: what the scheduler allows, and what its control group grants."""

from __future__ import annotations

import os
from numbers import Integral
from pathlib import Path

from tfm_export.errors import RequestError

MOST_THREADS = 1024  # ONNX Runtime starts them all, and each session its own


def threads_to_use(threads: int | None) -> int:
    """The number of computing threads that was asked for, or for None the CPUs that this process may use.

    Raises:
        RequestError: it is below 1 or above `MOST_THREADS`.
    """
    given: object = threads
    if given is not None and (isinstance(given, bool) or not isinstance(given, Integral)):
        raise RequestError(f"threads must be an integer, found {given!r}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise RequestError(f"threads must be from 1 to {MOST_THREADS:,}, found {threads:,}")
    return threads or usable_cpus()


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that computing threads can have at the same time; at least 1.

    The fewest of: the CPUs of the machine, those this process is bound to, and the quota of its control group and of
    every group around it. A quota of 2.5 CPUs counts as 2: threads that wait for each other at every operator lose
    more by being stopped in the middle than a third one brings. What a platform does not tell is left out.

    Args:
        root: where /proc and /sys/fs/cgroup are looked for.
    """
    quota = _cgroup_quota(root)
    cpus = _scheduler_cpus()
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def _scheduler_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux; macOS and Windows have none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_quota(root: Path) -> float | None:
    """The smallest quota in CPUs around this process; None if there is none or it cannot be read."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    mount = root / "sys/fs/cgroup"
    quotas = []
    for line in lines:  # hierarchy:controllers:path
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            quotas += [_version_2_quota(folder) for folder in _folder_and_parents(mount, path)]
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):  # mounted as cpu,cpuacct, often with a link named cpu
                quotas += [_version_1_quota(folder) for folder in _folder_and_parents(mount / name, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _folder_and_parents(mount: Path, path: str) -> list[Path]:
    """The group's folder and those above it up to the mount point; a container may see only the latter."""
    folder = mount / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def _version_2_quota(folder: Path) -> float | None:
    """cpu.max holds "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return _ratio(int(quota), int(period))
    except (OSError, ValueError):  # not there, or "max"
        return None


def _version_1_quota(folder: Path) -> float | None:
    """cpu.cfs_quota_us is -1 where there is no limit."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return _ratio(quota, int((folder / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return None


def _ratio(quota: int, period: int) -> float | None:
    return quota / period if quota > 0 and period > 0 else None
