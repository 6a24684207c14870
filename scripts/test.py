#!/usr/bin/env python3
"""Runs galley's test suites and adds up their results.

    scripts/test.py [SUITE...]      SUITE: unit rust asan tsan parity server (default: all, in this order)

Each suite's output is shown as it comes and kept in .cache/test/SUITE.log. The last line reads
`N passed, M failed` (and `, K skipped` where tests were). The exit status is 0 only when nothing failed and
every suite ran at least one test. Uses the standard library only.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".cache" / "test"
PYTHON = str(ROOT / ".venv" / "bin" / "python")


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: "Count") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def run(suite: str, command: list[str], env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a command, showing its output and appending it to the suite's log. Returns exit status and output."""
    print(f"$ {' '.join(command)}", flush=True)
    lines: list[str] = []
    with open(RESULTS / f"{suite}.log", "a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace")
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            log.write(line)
            lines.append(line)
        status = process.wait()
    return status, "".join(lines)


def count_gtest(folder: pathlib.Path) -> tuple[Count, set[str]]:
    """Adds up the reports that GoogleTest programs left in a folder; also names the programs that left one."""
    count = Count()
    programs = set()
    for report in sorted(folder.glob("*.json")):
        programs.add(report.stem)
        for group in json.loads(report.read_text())["testsuites"]:
            for test in group["testsuite"]:
                if test["status"] == "NOTRUN" or test["result"] == "SKIPPED":
                    count.skipped += 1
                elif test.get("failures"):
                    count.failed += 1
                else:
                    count.passed += 1
    return count, programs


def ctest(suite: str, preset: str, env: dict[str, str], programs: tuple[str, ...] = ()) -> Count:
    """Builds a preset and runs its ctest programs (all, or those named), counting single GoogleTest cases."""
    status, _ = run(suite, ["scripts/build.sh", preset, *programs])
    if status != 0:
        return Count(failed=1)
    build = "build" if preset == "release" else f"build-{preset}"
    reports = ROOT / build / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    junit = RESULTS / f"{suite}-ctest.xml"
    junit.unlink(missing_ok=True)
    selection = ["-R", f"^({'|'.join(programs)})(_[0-9])?$"] if programs else ["-E", "^rust_"]
    status, _ = run(suite, ["ctest", "--test-dir", build, *selection, "--parallel", str(os.cpu_count() or 1),
                            "--output-on-failure", "--timeout", "900", "--output-junit", str(junit)], env)
    count, reported = count_gtest(reports)
    # A program that crashed or hung left no report, and a program that is no GoogleTest leaves none: count it as one.
    if junit.exists():
        for case in xml.parse(junit).getroot().iter("testcase"):
            failed = case.get("status") != "run"
            if case.get("name") not in reported:
                count.add(Count(failed=1) if failed else Count(passed=1))
            elif failed and count.failed == 0:
                count.failed += 1  # every case passed, yet the program did not: a sanitizer's report at exit
    if status != 0 and count.failed == 0:
        count.failed = 1
    return count


def unit() -> Count:
    return ctest("unit", "release", {})


def asan() -> Count:
    """All rooms but the families, whose code unit_serve's forwards run."""
    # MLX's own containers are not instrumented, and mixing both kinds upsets that one check.
    return ctest("asan", "asan", {"ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1:"
                                                  "detect_container_overflow=0",
                                  "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"},
                 tuple(f"unit_{room}" for room in ("kernels", "sample", "text", "ops", "kv", "checkpoint", "serve", "api",
                                                   "http")))


def tsan() -> Count:
    """What threads share: the engine and the HTTP side, against a scripted forward."""
    return ctest("tsan", "tsan", {"TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1"},
                 ("unit_serve", "unit_api", "unit_http"))


def rust() -> Count:
    """`cargo test` of every crate, started by ctest so that it shares the build's target folder."""
    status, _ = run("rust", ["scripts/build.sh", "release"])
    if status != 0:
        return Count(failed=1)
    status, output = run("rust", ["ctest", "--test-dir", "build", "-R", "^rust_", "-V", "--no-tests=error"])
    count = Count()
    for passed, failed, ignored in re.findall(
            r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", output):
        count.add(Count(int(passed), int(failed), int(ignored)))
    if status != 0 and count.failed == 0:
        count.failed = 1
    return count


def last_line_count(suite: str, command: list[str], env: dict[str, str]) -> Count:
    """For a runner of our own whose last line reads `N passed, M failed`."""
    status, output = run(suite, command, env)
    found = re.findall(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?\s*$", output, re.M)
    count = Count()
    if found:
        passed, failed, skipped = found[-1]
        count = Count(int(passed), int(failed), int(skipped or 0))
    if status != 0 and count.failed == 0:
        count.failed = 1
    return count


def parity() -> Count:
    status, _ = run("parity", ["scripts/build.sh", "release"])
    if status != 0:
        return Count(failed=1)
    return last_line_count("parity", [PYTHON, "tests/parity/run.py"], {})


def server() -> Count:
    """The suites that drive the real program over its command line and sockets."""
    status, _ = run("server", ["scripts/build.sh", "release"])
    if status != 0:
        return Count(failed=1)
    junit = RESULTS / "server-pytest.xml"
    junit.unlink(missing_ok=True)
    status, _ = run("server", [PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={junit}",
                               "tests/server", "tests/robustness", "tests/structure"],
                    {"GALLEY_BIN": os.environ.get("GALLEY_BIN", str(ROOT / "build" / "galley"))})
    count = Count()
    if junit.exists():
        for group in xml.parse(junit).getroot().iter("testsuite"):
            tests, failures, errors, skipped = (int(group.get(k, "0")) for k in
                                                ("tests", "failures", "errors", "skipped"))
            count.add(Count(tests - failures - errors - skipped, failures + errors, skipped))
    if status != 0 and count.failed == 0:
        count.failed = 1
    return count


SUITES = {"unit": unit, "rust": rust, "asan": asan, "tsan": tsan, "parity": parity, "server": server}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        print(f"no such suite: {' '.join(unknown)}; there are: {' '.join(SUITES)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    total = Count()
    rows = []
    empty = []
    for name in names or list(SUITES):
        print(f"\n=== {name} ===", flush=True)
        (RESULTS / f"{name}.log").unlink(missing_ok=True)
        start = time.monotonic()
        count = SUITES[name]()
        rows.append((name, count, time.monotonic() - start))
        if count.passed + count.failed == 0:
            empty.append(name)
        total.add(count)

    print(f"\n{'suite':10} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for name, count, seconds in rows:
        print(f"{name:10} {count.passed:7} {count.failed:7} {count.skipped:8} {seconds:8.0f}")
    for name in empty:
        print(f"suite {name} ran no test, which counts as a failure")
        total.failed += 1
    skipped = f", {total.skipped} skipped" if total.skipped else ""
    print(f"{total.passed} passed, {total.failed} failed{skipped}")
    return 0 if total.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
