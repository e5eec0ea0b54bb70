"""Speed over commits: measures this one, adds it to `over_commits.jsonl`, and draws all of them.

    make track                                     # three models, about three minutes of processor time
    python benchmarks/over_commits.py --draw       # the figure of docs/performance.md alone

What is kept is a private step's processor time divided by that of an ordinary step of the same loop, on one thread, as
`benchmarks/speed.py` measures it: machines differ in it far less than in seconds. Measure in a tree without changes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equidp.pipelines.provenance import git_commit

HERE = Path(__file__).resolve().parent
KEPT, FIGURE = HERE / "over_commits.jsonl", HERE.parent / "docs" / "images" / "over_commits.svg"
MODELS = {"logistic": 256, "bilstm": 64, "cnn4": 256}
"""Models and their batch sizes."""

COLOURS = ("#0b5cad", "#c2410c", "#15803d")
WIDTH, HEIGHT, LEFT, ABOVE, STEP = 720, 260, 50, 30, 200


def measured(model: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """One line: what `benchmarks/speed.py` says of a model, and of which commit."""
    command = [sys.executable, str(HERE / "speed.py"), "--json", "--threads", "1", "--clock", "processor", "--opacus"]
    command += ["--model", model, "--batch-size", str(batch_size), "--rounds", str(rounds)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "commit": git_commit()[:12],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": platform.machine(),
        "torch": found["torch"],
        "model": model,
        "batch_size": batch_size,
        "ratio": round(found["ours_over_sgd"], 3),
        "quartiles": [round(end, 3) for end in found["ours_over_sgd_quartiles"]],
    }


def drawn(lines: Sequence[Mapping[str, Any]]) -> str:
    """An SVG: commits from left to right, a line of ratios with quartiles for each model."""
    commits = list(dict.fromkeys(line["commit"] for line in lines))
    top = max([2.0, *(line["quartiles"][1] for line in lines)])
    across = (WIDTH - LEFT - 130) / max(1, len(commits) - 1)

    def x(commit: str) -> float:
        return LEFT + 20 + across * commits.index(commit)

    def y(ratio: float) -> float:
        return ABOVE + STEP * (1 - ratio / top)

    parts = [f'<text x="{LEFT}" y="18">private step ÷ ordinary step, processor time, median and quartiles</text>']
    for tick in range(int(top) + 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 110}" y1="{y(tick)}" y2="{y(tick)}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{LEFT - 18}" y="{y(tick) + 4}">{tick}</text>')
    for model, colour in zip(MODELS, COLOURS, strict=True):
        mine = [line for line in lines if line["model"] == model]
        if not mine:
            continue
        points = " ".join(f"{x(line['commit']):.1f},{y(line['ratio']):.1f}" for line in mine)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for line in mine:
            at, (low, high) = x(line["commit"]), line["quartiles"]
            parts.append(f'<line x1="{at}" x2="{at}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="{colour}"/>')
            title = f"<title>{line['commit']}, {line['date']}: {line['ratio']}</title>"
            parts.append(f'<circle cx="{at}" cy="{y(line["ratio"]):.1f}" r="4" fill="{colour}">{title}</circle>')
        parts.append(
            f'<text x="{x(mine[-1]["commit"]) + 10}" y="{y(mine[-1]["ratio"]) + 4}" fill="{colour}">{model}</text>'
        )
    ends = dict.fromkeys((commits[0], commits[-1])) if commits else {}
    parts += [f'<text x="{x(commit) - 20}" y="{ABOVE + STEP + 20}">{commit[:7]}</text>' for commit in ends]
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    body = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>' + "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{body}</svg>\n'


def main() -> None:
    """Measure, keep, draw."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--draw", action="store_true", help="measure nothing")
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    lines = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()] if KEPT.is_file() else []
    for model, batch_size in () if options.draw else MODELS.items():
        lines.append(found := measured(model, batch_size, options.rounds))
        with KEPT.open("a", encoding="utf-8") as kept:
            print(json.dumps(found), file=kept)
        print(json.dumps(found), flush=True)
    FIGURE.write_text(drawn(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
