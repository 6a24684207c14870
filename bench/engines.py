"""Engine-only speed, without a server: `galley bench` and llama.cpp's own llama-batched-bench."""

from __future__ import annotations

import json
import pathlib
import subprocess
from dataclasses import dataclass, field
from statistics import median

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT = 128
GENERATE = 64
REPEAT = 2  # runs within one process, of which the median counts


@dataclass
class Samples:
    """Speeds in tokens a second, of all rows together, one entry a run."""

    prefill: list[float] = field(default_factory=list)
    decode: dict[int, list[float]] = field(default_factory=dict)

    def add_decode(self, batch: int, speed: float) -> None:
        self.decode.setdefault(batch, []).append(speed)

    def medians(self) -> dict:
        return {"prefill": median(self.prefill) if self.prefill else None,
                "decode": {batch: median(values) for batch, values in sorted(self.decode.items())}}


def _json_lines(command: list[str]) -> list[dict]:
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with {result.returncode}:\n{result.stderr[-2000:]}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


class Galley:
    name = "galley"

    def __init__(self, binary: pathlib.Path, model: pathlib.Path, threads: int) -> None:
        self._command = [str(binary), "bench", "--model", str(model), "--prompt", str(PROMPT), "--generate",
                         str(GENERATE), "--threads", str(threads), "--repeat", str(REPEAT), "--json"]
        self.about: dict = {}

    def run(self, samples: Samples, batches: tuple[int, ...] = BATCHES) -> None:
        report = _json_lines([*self._command, "--batch", ",".join(map(str, batches))])[-1]
        self.about = {key: report[key] for key in ("isa", "threads", "kernels")}
        samples.prefill.append(report["prefill"]["tok_s"])
        for entry in report["decode"]:
            samples.add_decode(entry["batch"], entry["tok_s"])


class LlamaCpp:
    """llama.cpp at its best: each batch size runs with whichever settings were fastest in a tuning pass."""

    name = "llama.cpp"
    SETTINGS = {
        "fa on, unified": ["-fa", "on", "-kvu"],
        "fa off, unified": ["-fa", "off", "-kvu"],
        "fa on, split": ["-fa", "on", "-no-kvu"],
        "fa off, split": ["-fa", "off", "-no-kvu"],
    }

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, threads: int) -> None:
        self._command = [str(folder / "llama-batched-bench"), "-m", str(model), "-npp", str(PROMPT), "-ntg",
                         str(GENERATE), "-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
        self.best: dict[int, str] = dict.fromkeys(BATCHES, "fa on, unified")
        self.about = json.loads((folder.parent / "build.json").read_text())

    def _measure(self, batch: int, settings: str, repeat: int = REPEAT) -> tuple[float, float]:
        """Prefill and decode speed. Each batch size gets a context of just its size."""
        context = batch * 256  # multiple of 256, which llama.cpp pads to
        reports = _json_lines([*self._command, "-npl", ",".join([str(batch)] * repeat), "-c", str(context),
                               *self.SETTINGS[settings]])
        return median(r["speed_pp"] for r in reports), median(r["speed_tg"] for r in reports)

    def tune(self, batches: tuple[int, ...] = BATCHES) -> dict:
        """Picks the settings for each batch size by one run of each; returns what was measured."""
        table = {batch: {settings: self._measure(batch, settings, repeat=1)[1] for settings in self.SETTINGS}
                 for batch in batches}
        for batch, speeds in table.items():
            self.best[batch] = max(speeds, key=lambda settings: speeds[settings])
        return table

    def run(self, samples: Samples, batches: tuple[int, ...] = BATCHES) -> None:
        prefill = []
        for batch in batches:
            speed, decode = self._measure(batch, self.best[batch])
            prefill.append(speed)
            samples.add_decode(batch, decode)
        samples.prefill.append(max(prefill))  # a longer batch of prompts may be read faster: count the best
