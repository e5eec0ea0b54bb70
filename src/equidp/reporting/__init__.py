"""From results to something readable: tables, figures, the privacy statement, HTML pages, the documents that go out.

- `tables`: one row per algorithm or group. `figures/`: Plotly figures by subject. `style`: how all of them look.
- `privacy_report`: `privacy.json` in words. `tuning`: what choosing the best of several runs costs.
- `page`: the page of a run or a comparison. `page_warnings`: what stands on top. `rendering`: HTML as text.
- `runs`: tracked runs as frames for the figures.
- `release/`: the documents that go out with a model, and the one place that decides what may go out.

It imports `evaluation`, `accounting`, `data`, `parameters` and what stands below them; it knows neither Kedro nor
MLflow, and it writes no file. Begin with `page.html_report`; for what goes out with `release.documents`.
"""
