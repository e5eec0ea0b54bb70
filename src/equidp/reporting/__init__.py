"""Reports on results: tables, figures, the privacy statement, HTML pages, and the documents that are published.

- `tables`: one row per algorithm or group. `figures/`: Plotly figures by subject. `style`: their common style.
- `privacy_report`: `privacy.json` in words. `attack`: what an attacker can do at most.
- `page`: the page of a run or a comparison. `rendering`: HTML as text.
- `runs`: tracked runs as frames for the figures.
- `release/`: the documents that are published with a model, and the one place that decides what may be published.

It imports `evaluation`, `accounting`, `data`, `parameters` and the layers below them, but neither Kedro nor MLflow, and
it writes no file. Begin with `page.html_report`; for published documents with `release.documents`.
"""
