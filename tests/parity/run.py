"""Compares galley's stock rung with live mlx-lm and, for quantized KV, live mlx-optiq, bit for bit, and writes the table
in docs/parity.md.

    python tests/parity/run.py [--driver PROGRAM] [--only WORD] [--jobs N]

--only runs the models whose family and name hold WORD, and leaves the table alone.
"""

import argparse
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cases  # noqa: E402
import divergence  # noqa: E402
import families  # noqa: E402
import oracle  # noqa: E402


ROOT = Path(__file__).resolve().parents[2]


def read_results(path):
    """The driver's records as {case: Run}."""
    data, at, results = path.read_bytes(), 0, {}
    while at < len(data):
        case, request, token, size = struct.unpack_from("<4i", data, at)
        at += 16
        run = results.setdefault(case, oracle.Run([], []))
        if request == -2:
            run.cached[token], = struct.unpack_from("<i", data, at)
        elif request < 0:
            run.forwards.append((token, *struct.unpack_from("<2i", data, at)))
        else:
            run.emissions.append(oracle.Emission(request, token, data[at:at + size]))
        at += size
    return results


def differences(expected, found, serial):
    """What keeps two runs from being the same, or None: tokens and log-probabilities of every step of every request,
    and the shape of every forward (on some machines MLX's bits hardly depend on the batch; the schedule must be
    mlx-lm's all the same)."""
    def by_request(emissions):
        rows = {}
        for emission in emissions:
            rows.setdefault(emission.request, []).append(emission)
        return rows

    want, have = by_request(expected.emissions), by_request(found.emissions)
    if want.keys() != have.keys():
        return f"requests {sorted(have)} answered, expected {sorted(want)}"
    for request in sorted(want):
        if len(want[request]) != len(have[request]):
            return f"request {request}: {len(have[request])} tokens, expected {len(want[request])}"
        for step, (a, b) in enumerate(zip(want[request], have[request])):
            if a.token != b.token:
                return f"request {request}, step {step}: token {b.token}, expected {a.token}"
            if a.logprobs != b.logprobs:
                return f"request {request}, step {step}: log-probabilities differ"
    if found.cached != expected.cached:
        return f"tokens reused {found.cached}, expected {expected.cached}"
    # generate_step launches steps beyond the last token it yields; the serial lane doesn't.
    forwards = expected.forwards[:len(found.forwards)] if serial else expected.forwards
    for number, (a, b) in enumerate(zip(forwards, found.forwards)):
        if a != b:
            return f"forward {number}: (rows, tokens, columns) {b}, expected {a}"
    if len(forwards) != len(found.forwards):
        return f"{len(found.forwards)} forwards, expected {len(forwards)}"
    return None


def comparison_can_fail(expected, found, serial):
    """The comparison must notice one flipped bit, one missing token and one forward with another row."""
    *rest, last = found.emissions
    flipped = oracle.Emission(last.request, last.token, bytes([last.logprobs[0] ^ 1]) + last.logprobs[1:])
    rows, *shape = found.forwards[-1]
    planted = [
        oracle.Run([*rest, flipped], found.forwards, found.cached),
        oracle.Run(rest, found.forwards, found.cached),
        oracle.Run(found.emissions, [*found.forwards[:-1], (rows + 1, *shape)], found.cached),
    ]
    return all(differences(expected, plant, serial) is not None for plant in planted)


def markdown(rows, drifts, passed, failed):
    lines = [
        "# Parity",
        "",
        f"galley's stock rung against live mlx-lm {version('mlx-lm')} on MLX {version('mlx-cpu')}, tiny random models, "
        "CPU: greedy tokens and the raw bytes of every step's log-probabilities, in the model's own type, at the same "
        "batch size. Serial cases run against `generate_step`, the others against `BatchGenerator`, tick by tick, "
        "through the server's own Scheduler; every forward must have the same rows, length and cache width. Where prompts "
        "reuse KV, mlx-lm's own `LRUPromptCache` says which, used as its server uses it.",
        "",
        f"With quantized KV the oracle is mlx-optiq {version('mlx-optiq')}, which makes those two quantize it: `optiq serve "
        "--no-fused-kv` with `--kv-bits` or `--kv-config`. It keeps sliding layers as they are in a batch, and the first "
        "prompt piece is attended to unquantized by `generate_step`; so does galley. Two faults of it are mended: a "
        "batch made of empty caches forgets their format and takes 8 bits in groups of 64, whatever was asked; and layers "
        "that share KV could take its format from a cache that is gone.",
        "",
        "Written by `make parity`.",
        "",
        "| family | model | rung | case | oracle | requests | tokens | bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for *columns, problem in rows:
        lines.append(f"| {' | '.join(map(str, columns))} | {problem or 'equal'} |")
    lines += ["", f"{passed} passed, {failed} failed", "", *divergence.markdown(drifts)]
    return "\n".join(lines)


@dataclass
class Checked:
    """What came of one variant."""
    rows: list  # of the table; the last column is the problem, or None
    drift: divergence.Drift | None = None

    def lines(self):
        for family, name, rung, case, *_, problem in self.rows:
            yield f"{family} | {name} | {rung} | {case} | {problem or 'equal'}"
        if self.drift:
            yield self.drift.line()


def check(number, driver_path):
    """Runs galley and the oracle on one of the variants, each in a process of its own."""
    variant = families.VARIANTS[number]
    drifting = variant in divergence.watched(families.VARIANTS)
    with tempfile.TemporaryDirectory(prefix="galley-parity-") as temporary:
        folder, script_path, result = (Path(temporary) / name for name in ("model", "script.json", "result.bin"))
        families.build(variant, folder)
        script = cases.of(families.text_config_of(variant), variant)
        # The driver alone runs these too; the oracle has no part in how far B=N is from B=1.
        watched = divergence.case_of(script) if drifting else 0
        alone = [divergence.alone(script[watched])] if drifting else []
        script_path.write_text(json.dumps(script + alone))
        driver = subprocess.Popen([driver_path, folder, script_path, result, variant.kv_quant])
        expected = oracle.run_all(families.load(folder), script, variant, folder)
        broken = driver.wait(timeout=600) != 0
        found = {} if broken else read_results(result)
    checked = Checked([])
    if alone and not broken:
        checked.drift = divergence.measure(variant, found[len(script)], found[watched])
    for index, case in enumerate(script):
        have = found.get(index, oracle.Run([], []))
        serial = case["mode"] == "serial"
        problem = "the driver failed" if broken else differences(expected[index], have, serial)
        if problem is None and not comparison_can_fail(expected[index], have, serial):
            problem = "a planted difference went unnoticed"
        rung = "stock serial" if serial else "stock batched"
        against = "mlx-lm" if variant.kv_quant == "off" else "mlx-optiq"
        checked.rows.append((variant.family, variant.name, rung, case["name"], against, len(case["requests"]),
                             len(expected[index].emissions), problem))
    return checked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", type=Path, default=ROOT / "build/tests/parity/galley-parity-driver")
    parser.add_argument("--only", default="", help="run the models whose family and name hold this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="models that are run side by side")
    options = parser.parse_args()

    started = time.time()
    chosen = [number for number, v in enumerate(families.VARIANTS) if options.only in f"{v.family} {v.name}"]
    rows, drifts = [], {}
    # New interpreters, not forks: MLX's threads don't live on in a fork.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for checked in pool.map(check, chosen, repeat(options.driver)):
            print("\n".join(checked.lines()), flush=True)
            rows += checked.rows
            if checked.drift:
                drifts[checked.drift.family] = checked.drift
    failed = sum(problem is not None for *_, problem in rows)
    passed = len(rows) - failed
    if not options.only:
        (ROOT / "docs/parity.md").write_text(markdown(rows, drifts, passed, failed))
    print(f"{time.time() - started:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
