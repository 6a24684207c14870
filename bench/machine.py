"""What the benchmark needs to know of the machine: what it is, how busy it is, what a process uses."""

from __future__ import annotations

import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

# The share of all cores that others may use before figures are worthless: engines that spin at barriers lose half
# their speed to a tenth of a core.
QUIET_PERCENT = 3.0


def describe() -> dict[str, Any]:
    """The machine in words, for the report."""
    name, flags = platform.processor() or platform.machine(), ""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value
    else:  # a Mac
        name = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True,
                              check=False).stdout.strip() or name
    known = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm")
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "features": [feature for feature in known if feature in flags.split()],
            "system": f"{platform.system()} {platform.machine()}"}


@dataclass
class _Ticks:
    busy: float
    steal: float
    total: float


def _ticks() -> _Ticks | None:
    try:
        fields = [float(value) for value in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = fields
    return _Ticks(user + nice + system + irq + softirq, steal, sum(fields))


class LoadWatch:
    """Measures, from its making on, what everyone but our own (finished) child processes used of the machine."""

    def __init__(self) -> None:
        self._ticks = _ticks()
        self._own = self._own_seconds()
        self._start = time.monotonic()

    @staticmethod
    def _own_seconds() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    def others_percent(self) -> float:
        """Share of all cores, 0 to 100, stolen by the host or used by processes that are not ours."""
        now = _ticks()
        if now is None or self._ticks is None:  # a Mac: no /proc; the load average has to do
            return max(0.0, os.getloadavg()[0]) / (os.cpu_count() or 1) * 100
        hertz = os.sysconf("SC_CLK_TCK")
        total = (now.total - self._ticks.total) / hertz
        busy = (now.busy - self._ticks.busy + now.steal - self._ticks.steal) / hertz
        if total <= 0:
            return 0.0
        return max(0.0, busy - (self._own_seconds() - self._own)) / total * 100


def load_now(seconds: float = 3.0) -> float:
    """Share of the machine that others use at this moment, 0 to 100."""
    watch = LoadWatch()
    time.sleep(seconds)
    return watch.others_percent()


class QuietRun:
    """A run whose steps begin on a quiet machine only, and which knows how quiet it was in the end."""

    PATIENCE_SECONDS = 300

    def __init__(self, allow_loaded: bool) -> None:
        self._allow_loaded = allow_loaded
        self._loads: list[float] = []

    def given_up(self) -> None:
        """Called before the run ends because others don't leave the machine alone."""

    def step(self, what: str) -> LoadWatch:
        """Announces a step. A short disturbance is waited for, unless it is there from the start."""
        patience = time.monotonic() + (self.PATIENCE_SECONDS if self._loads else 0)
        while (load := load_now(1.0)) > QUIET_PERCENT and not self._allow_loaded:
            if time.monotonic() > patience:
                self.given_up()
                sys.exit(f"error: other processes use {load:.0f} % of the machine, so figures would mean nothing. Stop "
                         'them, or stamp the result as loaded: make bench ARGS="--allow-loaded"')
        print(f"{datetime.now():%H:%M:%S} {what}", flush=True)
        return LoadWatch()

    def done(self, watch: LoadWatch) -> None:
        self._loads.append(watch.others_percent())

    def stamp(self) -> dict[str, Any]:
        """When and where it ran, and whether that was quiet enough."""
        worst = max(self._loads, default=0.0)
        # Short-lived activity of the system itself is always there: the bound during a run is wider than before it.
        return {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "machine": describe(), "others_percent_max": worst,
                "quiet": worst <= 2 * QUIET_PERCENT}


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident memory of a process: all of it, and the parts that are the process's own and mapped files."""
    path = pathlib.Path(f"/proc/{pid}/status")
    if path.exists():
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        kib = {key: int(fields[name].split()[0]) * 1024 for key, name in
               (("total", "VmRSS"), ("own", "RssAnon"), ("files", "RssFile"))}
        return kib
    text = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    return {"total": int(text) * 1024}


class BusyNeighbour:
    """One process that does nothing but burn a core."""

    def __enter__(self) -> BusyNeighbour:
        self._process = subprocess.Popen(["sh", "-c", "while :; do :; done"])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
