"use strict";

// Legend rows and upright category names take their room below and above the plot, not out of it.
function extraHeight(chart, width) {
  const named = chart.data.filter((trace) => trace.showlegend !== false && trace.name).length;
  const rows = Math.ceil(named / Math.max(1, Math.floor(width / 165)));
  const ticks = ((chart.layout.xaxis || {}).ticktext || []).map((text) => text.length);
  const upright = ticks.reduce((sum, length) => sum + length + 2, 0) * 6.5 > width;
  return Math.max(0, rows - 1) * 20 + (upright ? Math.max(...ticks) * 6 : 0);
}

// Unpacks the library where the page holds it; its hash is among the scripts that the page's policy allows.
async function unpack() {
  const packed = document.getElementById("library");
  if (packed.type !== "application/gzip") return;
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
}

function drawCharts() {
  const note = document.getElementById("undrawn");
  if (note === null) return; // a page without figures
  if (typeof Plotly === "undefined") {
    const missing = document.getElementById("library").getAttribute("src");
    note.textContent = `Charts need the file ${missing}, from where this page lay. The page in MLflow needs no other file.`;
    return;
  }
  note.remove();
  for (const data of document.querySelectorAll("script[data-chart]")) {
    const chart = JSON.parse(data.textContent);
    const place = document.getElementById(data.dataset.chart);
    place.style.height = `${chart.layout.height + extraHeight(chart, place.clientWidth)}px`;
    delete chart.layout.height;
    Plotly.newPlot(place, chart.data, chart.layout, { responsive: true, displaylogo: false });
  }
}

function compare(a, b) {
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
}

function sortBy(table, column, heading) {
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
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
  table.querySelectorAll("thead th").forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => sortBy(table, column, heading));
  });
}
addEventListener("beforeprint", () => {
  for (const statement of document.querySelectorAll("details")) statement.open = true;
});
unpack().then(drawCharts);
