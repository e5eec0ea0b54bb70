"use strict";

function drawCharts() {
  for (const data of document.querySelectorAll("script[data-chart]")) {
    const chart = JSON.parse(data.textContent);
    Plotly.newPlot(data.dataset.chart, chart.data, chart.layout, { responsive: true, displaylogo: false });
  }
}

function compare(a, b) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
}

function sortBy(table, column, heading) {
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const key = (row) => row.cells[column].dataset.key;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const undefinedLast = (key(a) === undefined) - (key(b) === undefined);
    return undefinedLast || (descending ? -1 : 1) * compare(key(a), key(b));
  });
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => sortBy(table, column, heading));
  });
}
drawCharts();
