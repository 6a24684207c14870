"""The benchmark's results as a table for the terminal, a page in docs/ and a chart."""

from __future__ import annotations

from html import escape
from typing import Any


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}×" if ours and theirs else "–"


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def engine_rows(engines: dict[str, Any]) -> list[list[str]]:
    """[what, galley, llama.cpp, ratio] in tokens a second."""
    ours, theirs = engines["galley"], engines["llama.cpp"]
    rows = [["prefill", _number(ours["prefill"]), _number(theirs["prefill"]), _ratio(ours["prefill"], theirs["prefill"])]]
    for batch in sorted(ours["decode"], key=int):
        a, b = ours["decode"][batch], theirs["decode"].get(batch)
        rows.append([f"decode, B = {batch}", _number(a), _number(b), _ratio(a, b)])
    return rows


def server_rows(report: dict[str, Any]) -> list[list[str]]:
    """[what, galley, llama.cpp, ratio]: speeds, then times in milliseconds."""
    names = (("tok_s", "tokens/s in all"), ("ttft_p50_ms", "TTFT p50, ms"), ("ttft_p95_ms", "TTFT p95, ms"),
             ("itl_p50_ms", "ITL p50, ms"), ("itl_p95_ms", "ITL p95, ms"))
    rows = []
    for level, ours in report["server"]["galley"].items():
        theirs = report["server"]["llama.cpp"].get(level, {})
        streams = f"{level} stream{'s' if int(level) > 1 else ''}"
        for key, label in names:
            a, b = ours[key], theirs.get(key)
            rows.append([f"{streams}: {label}", _number(a, 0 if key == "tok_s" else 1),
                         _number(b, 0 if key == "tok_s" else 1), _ratio(a, b)])
    return rows


def neighbour_rows(report: dict[str, Any]) -> list[list[str]]:
    """[what, galley, llama.cpp, …]: share of the quiet speed that is left beside one busy process."""
    ours, theirs = report["neighbour"]["galley"], report["neighbour"]["llama.cpp"]
    rows = []
    for what in ours:
        cells = []
        for side in (ours, theirs):
            entry = side.get(what)
            cells.append(f"{entry['tok_s']:.0f} ({entry['of_quiet'] * 100:.0f} %)" if entry else "–")
        rows.append([f"{what}, one busy neighbour", *cells,
                     _ratio(ours[what]["tok_s"], theirs.get(what, {}).get("tok_s"))])
    return rows


def footprint_rows(report: dict[str, Any]) -> list[list[str]]:
    footprint = report["footprint"]
    mb = 1e6
    return [
        ["ready after", f"{footprint['ready_seconds']:.2f} s"],
        ["resident when ready", f"{footprint['resident_ready']['total'] / mb:.0f} MB"],
        ["resident after all streams", f"{footprint['resident_after']['total'] / mb:.0f} MB"],
        ["model file", f"{footprint['file_bytes'] / mb:.0f} MB"],
        ["KV in use at the peak, budget", f"{footprint['kv_peak_bytes'] / mb:.0f} MB, "
                                          f"{footprint['kv_budget_bytes'] / mb:.0f} MB"],
    ]


def loading_rows(report: dict[str, Any]) -> list[list[str]]:
    seen, mb = report["loading"], 1e6
    return [["file", f"{seen['file_bytes'] / mb:.0f} MB"], ["ready after", f"{seen['ready_seconds']:.2f} s"],
            ["most memory by then", f"{seen['peak_bytes'] / mb:.0f} MB"],
            ["1.5 times the file + 200 MB", f"{(1.5 * seen['file_bytes'] + 200 * mb) / mb:.0f} MB"]]


def text_table(heading: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(len(heading))]

    def line(row: list[str]) -> str:
        return "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                         for column, (cell, width) in enumerate(zip(row, widths)))
    return "\n".join([line(heading), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def markdown_table(heading: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in
                     [heading, ["---", *("---:" for _ in heading[1:])], *rows])


def tables(report: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, heading, rows) of every part that was measured."""
    peers = ["galley", "llama.cpp", "ratio"]
    parts = []
    if "engine" in report:
        parts.append(("Engine, tokens a second of all rows together", ["", *peers], engine_rows(report["engine"])))
    if "sliding" in report:
        parts.append((f"{report['sliding']['model']}, sliding windows: engine, tokens a second of all rows together",
                      ["", *peers], engine_rows(report["sliding"])))
    if "server" in report:
        parts.append(("Through the servers", ["", *peers], server_rows(report)))
    if "neighbour" in report:
        parts.append(("With a busy neighbour, tokens a second (share of the quiet speed)", ["", *peers],
                      neighbour_rows(report)))
    if "footprint" in report:
        parts.append(("galley's footprint", ["", "measured"], footprint_rows(report)))
    if "loading" in report:
        parts.append(("Loading a GGUF in the shape of Qwen2.5-0.5B Q4_K_M (random weights, its vocabulary)", ["", "measured"],
                      loading_rows(report)))
    return parts


def caption(report: dict[str, Any]) -> str:
    machine, galley, llama = report["machine"], report["about"]["galley"], report["about"]["llama.cpp"]
    stamp = "" if report["quiet"] else " **The machine was loaded while this ran: don't quote these figures.**"
    return (f"{report['model']}; {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['features'])}); "
            f"galley {galley.get('kernels', '')} on {galley.get('isa', '')}; llama.cpp from {llama['package']} "
            f"{llama['version']}, native build, best of its settings for each figure. Medians of {report['rounds']} "
            f"interleaved runs on {report['date']}; others used at most {report['others_percent_max']:.1f} % of the "
            f"machine.{stamp}")


def as_text(report: dict[str, Any]) -> str:
    parts = [f"{title}\n{text_table(heading, rows)}" for title, heading, rows in tables(report)]
    return "\n\n".join([caption(report).replace("**", ""), *parts])


def as_markdown(report: dict[str, Any]) -> str:
    parts = [f"## {title}\n\n{markdown_table(heading, rows)}" for title, heading, rows in tables(report)]
    return "\n\n".join(["# Benchmark\n\nMade by `make bench`; the same figures are in `bench.json`.",
                        caption(report), "![chart](bench.svg)", *parts]) + "\n"


# The chart ---------------------------------------------------------------------------------------------------------

_OURS, _THEIRS, _INK, _FAINT = "#0b7a75", "#b8b8b8", "#222222", "#dddddd"
_PANEL_WIDTH, _PANEL_HEIGHT, _TOP, _LEFT = 520, 250, 70, 50


def _nice_ceiling(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten that has room for labels above the bars."""
    value *= 1.12
    power = 10.0 ** len(str(int(value))) / 10
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value)


def _panel(title: str, groups: list[tuple[str, float, float]], left: float) -> list[str]:
    """One set of paired bars; groups are (label, galley, llama.cpp)."""
    ceiling = _nice_ceiling(max(max(a, b) for _, a, b in groups))
    base = _TOP + _PANEL_HEIGHT
    out = [f'<text x="{left}" y="{_TOP - 18}" font-size="14" font-weight="600">{escape(title)}</text>']
    for tick in range(5):
        y = base - _PANEL_HEIGHT * tick / 4
        out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + _PANEL_WIDTH}" y2="{y:.1f}" stroke="{_FAINT}"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" font-size="11" text-anchor="end">{ceiling * tick / 4:.0f}'
                   '</text>')
    width = _PANEL_WIDTH / len(groups)
    bar = min(34.0, width * 0.36)
    for index, (label, ours, theirs) in enumerate(groups):
        middle = left + width * (index + 0.5)
        for value, x, colour in ((ours, middle - bar, _OURS), (theirs, middle, _THEIRS)):
            height = _PANEL_HEIGHT * value / ceiling
            out.append(f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{bar:.1f}" height="{height:.1f}" '
                       f'fill="{colour}"><title>{escape(label)}: {value:.0f} tokens/s</title></rect>')
        top = base - _PANEL_HEIGHT * max(ours, theirs) / ceiling
        out.append(f'<text x="{middle:.1f}" y="{top - 6:.1f}" font-size="12" font-weight="600" text-anchor="middle">'
                   f'{escape(_ratio(ours, theirs))}</text>')
        out.append(f'<text x="{middle:.1f}" y="{base + 18}" font-size="12" text-anchor="middle">{escape(label)}</text>')
    return out


def as_svg(report: dict[str, Any]) -> str:
    """Bars for decode by batch size and for concurrent streams, each with galley's multiple of llama.cpp."""
    panels = []
    if "engine" in report:
        ours, theirs = report["engine"]["galley"]["decode"], report["engine"]["llama.cpp"]["decode"]
        panels.append(("Engine decode, tokens/s by rows in the batch",
                       [(str(b), ours[b], theirs[b]) for b in sorted(ours, key=int) if theirs.get(b)]))
    if "server" in report:
        ours, theirs = report["server"]["galley"], report["server"]["llama.cpp"]
        panels.append(("Through the server, tokens/s by concurrent streams",
                       [(level, ours[level]["tok_s"], theirs[level]["tok_s"]) for level in ours if level in theirs]))
    width = _LEFT + len(panels) * (_PANEL_WIDTH + _LEFT + 10)
    height = _TOP + _PANEL_HEIGHT + 50
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           f'font-family="system-ui, sans-serif" fill="{_INK}">',
           f'<rect width="{width}" height="{height}" fill="white"/>']
    for index, (name, colour) in enumerate((("galley", _OURS), ("llama.cpp", _THEIRS))):
        x = _LEFT + index * 100
        out.append(f'<rect x="{x}" y="14" width="14" height="14" fill="{colour}"/>')
        out.append(f'<text x="{x + 20}" y="26" font-size="13">{name}</text>')
    for index, (title, groups) in enumerate(panels):
        out += _panel(title, groups, _LEFT + index * (_PANEL_WIDTH + _LEFT + 10))
    machine = report["machine"]
    out.append(f'<text x="{_LEFT}" y="{height - 10}" font-size="11">{escape(report["model"])}, {escape(machine["cpu"])}, '
               f'{machine["cores"]} cores{"" if report["quiet"] else " — loaded machine, do not quote"}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
