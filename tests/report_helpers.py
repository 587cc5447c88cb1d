"""Results of reproduced papers, as far as a report shows them."""

from __future__ import annotations

import numpy as np


def papers_results(seed=0):
    """What reproducing papers writes: rows that ran, a stand-in, rows that did not, drawings."""
    rng = np.random.default_rng(seed)
    sets = ["STS-B", "STS12", "a|b <i>"]

    def row(model, status, *, published=True, **more):
        cells = {}
        for name in sets:
            theirs = float(rng.uniform(20, 60)) if published else None
            every = {how: float(rng.uniform(20, 90)) for how in ("all", "mean", "wmean")}
            ours = {**every, "ours": every["mean"], "difference": every["mean"] - (theirs or 0.0)}
            cells[name] = {"published": theirs, **(ours if status != "not run" else {})}
        return {"model": model, "setting": "token=AVG, layer=L1+L12", "status": status,
                "figures": cells, **more}  # fmt: skip

    rows = [
        row("own <b>model</b>", "ran", hub="own", ran_with="own", layers=[1, 12],
            command="whiten-index eval sts --model 'a <own> `model`' --layers 1,12"),
        row("BERT-base", "stand-in", why="bert is <far> away", ran_with="MiniLM", layers=[1, 6],
            command="whiten-index eval sts --model MiniLM",
            command_of_own="whiten-index eval sts --model bert", notes=["a note | of it"]),
        row("GPT_3", "not run", why="no weights & no hope"),
        row("unpublished", "ran", published=False),
    ]  # fmt: skip
    table = {"source": "Paper & Co", "table": "Table 1", "title": "a title", "datasets": sets,
             "aggregation": "mean", "metric": "spearman", "rows": rows}  # fmt: skip
    shares = {"published": 0.5531, "ours": 0.5632, "f1": 0.4321, "notes": ["by chance"]}
    further = {"source": "Another paper", "table": "Table 9", "aggregation": None,
               "metric": "mrr@10", "datasets": ["QQP"], "title": "search", "rows": [
                   {"model": "m", "setting": "", "status": "ran",
                    "figures": {"QQP": shares}}]}  # fmt: skip
    square = rng.uniform(-5, 80, (5, 5))
    series = [{"name": f"S_{n}", "y": [None, *map(float, rng.uniform(30, 70, 3))]}
              for n in range(6)]  # fmt: skip
    return {
        "made": {"versions": {"torch": "2.13"}, "date": "2026-11-21T10:30:00", "seconds": 12.5},
        "stand_in": {"model": "MiniLM", "layers": 6, "dim": 384},
        "tables": [table, further],
        "figures": [
            {"id": "k", "source": "Paper & Co", "title": "Effect of <k>", "kind": "curves",
             "x": [16, 64, 128, 256], "x_label": "k", "y_label": "Spearman × 100",
             "series": series, "caption": "Of a set."},
            {"id": "k", "source": "Paper & Co", "title": "Pairs", "kind": "heat_map",
             "matrix": ((square + square.T) / 2).tolist(), "labels": list("01234"),
             "axis": "layer", "caption": "Raw."},
        ],
        "not_run": [{"source": "A third", "table": "Table 2", "model": f"flow {n}", "setting": "",
                     "why": "takes <training>"} for n in (1, 2)],
    }  # fmt: skip
