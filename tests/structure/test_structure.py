"""The shape of the source tree: dependencies point one way, MLX stays below, files stay small enough to hold in the head."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

# What each room may include, beside itself. (DESIGN: app -> http -> api -> serve -> {sample, text, kv, models} -> ops.)
MAY_USE = {
    "app": {"http", "api", "serve", "sample", "text", "kv", "models", "ops"},
    "http": {"api", "ops"},  # of ops, everything above models sees error.h alone
    "api": {"serve", "sample", "text", "ops"},
    "serve": {"sample", "text", "kv", "models", "ops"},
    "models": {"sample", "text", "kv", "ops"},
    "kv": {"ops"},
    "sample": {"ops"},
    "text": {"ops"},
    "ops": set(),
}
ONLY_ERROR = {"http", "api", "serve", "text"}  # rooms that may take nothing but the error type from ops
MLX_ROOMS = {"app", "models", "kv", "ops"}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)


def sources():
    files = sorted(p for p in SRC.rglob("*") if p.suffix in {".h", ".cc"})
    assert len(files) > 60, "the source tree was not found"
    return files


def test_dependencies_point_one_way():
    wrong = []
    for path in sources():
        relative = path.relative_to(SRC)
        room = relative.parts[0]
        for include in INCLUDE.findall(path.read_text()):
            other = include.split("/")[0]
            if other not in MAY_USE or other == room:
                continue
            if other not in MAY_USE[room]:
                wrong.append(f"{relative} includes {include}")
            elif other == "ops" and room in ONLY_ERROR and include != "ops/error.h":
                wrong.append(f"{relative} includes {include}")
    assert wrong == []


def test_mlx_stays_below():
    wrong = []
    for path in sources():
        relative = path.relative_to(SRC)
        allowed = relative.parts[0] in MLX_ROOMS and relative.parts[:2] != ("ops", "kernels")
        if not allowed and any(i.startswith("mlx/") for i in INCLUDE.findall(path.read_text())):
            wrong.append(str(relative))
    assert wrong == []


def test_json_and_http_stay_above():
    wrong = []
    for path in sources():
        relative = path.relative_to(SRC)
        if relative.parts[0] in {"serve", "sample", "kv", "ops"}:
            for include in INCLUDE.findall(path.read_text()):
                if include.startswith(("nlohmann/", "boost/")):
                    wrong.append(f"{relative} includes {include}")
    assert wrong == []


def test_files_are_small():
    long = [f"{p.relative_to(ROOT)}: {n} lines"
            for p in [*sources(), *(ROOT / "tests").rglob("*.cc"), *(ROOT / "crates").rglob("*.rs")]
            if "target" not in p.parts and (n := len(p.read_text().splitlines())) > 600]
    assert long == []


def test_headers_open_no_namespaces_and_nothing_is_newed_by_hand():
    wrong = []
    for path in sources():
        code = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', "", path.read_text())
        if path.suffix == ".h" and "using namespace" in code:
            wrong.append(f"{path.relative_to(ROOT)}: using namespace in a header")
        if re.search(r"(?<![\w:])new\s+[A-Za-z_:<]", code) or re.search(r"(?<![\w=])delete\s+\w", code):
            wrong.append(f"{path.relative_to(ROOT)}: naked new or delete")
    assert wrong == []
