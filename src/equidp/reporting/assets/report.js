"use strict";

function drawCharts() {
  for (const data of document.querySelectorAll("script[data-chart]")) {
    const chart = JSON.parse(data.textContent);
    Plotly.newPlot(data.dataset.chart, chart.data, chart.layout, { responsive: true, displaylogo: false });
  }
}

function compare(a, b) {
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
}

function sortBy(table, column, heading) {
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const key = (row) => row.cells[column].dataset.key;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    return descending ? compare(y, x) : compare(x, y);
  });
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => sortBy(table, column, heading));
  });
}
addEventListener("beforeprint", () => {
  for (const statement of document.querySelectorAll("details")) statement.open = true;
});
drawCharts();
