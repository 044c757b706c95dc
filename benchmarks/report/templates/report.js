"use strict";

// "1,234 [1,200, 1,260]" sorts by its first number, text by the alphabet, empty cells last.
function sortKey(text) {
  const match = /^[~+]?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)/i.exec(text.trim());
  return match ? parseFloat(match[1].replaceAll(",", "")) : text.trim();
}

function compare(a, b) {
  const numbers = typeof a === "number" && typeof b === "number";
  if (numbers) return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b);
}

function sortBy(header) {
  const table = header.closest("table");
  const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of header.parentElement.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [sortKey(row.cells[header.cellIndex].textContent), row]);
  keyed.sort((a, b) => sign * compare(a[0], b[0]));
  body.append(...keyed.map(([, row]) => row));
}

function filterRows(input) {
  const words = input.value.toLowerCase().split(/\s+/);
  for (const row of input.nextElementSibling.querySelectorAll("tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
}

// Lists of numbers on one line, all else indented.
function readable(value) {
  const flat = Array.isArray(value) && value.every((item) => typeof item !== "object");
  return flat ? value.join(", ") : JSON.stringify(value, null, 1);
}

function showSource(id) {
  const source = sources[id];
  document.getElementById("provenance-title").textContent = id;
  const table = document.createElement("table");
  for (const [name, value] of Object.entries(source)) {
    const row = table.insertRow();
    const head = document.createElement("th");
    head.textContent = name;
    row.append(head);
    const pre = document.createElement("pre");
    pre.textContent = typeof value === "string" ? value : readable(value);
    row.insertCell().append(pre);
  }
  document.getElementById("provenance-body").replaceChildren(table);
  document.getElementById("provenance").showModal();
}

const sources = JSON.parse(document.getElementById("sources").textContent);
document.addEventListener("click", (event) => {
  const source = event.target.closest("button.source");
  if (source) return showSource(source.dataset.record);
  const header = event.target.closest("table.sortable th");
  if (header && header.textContent) sortBy(header);
});
for (const input of document.querySelectorAll(".filter")) {
  input.addEventListener("input", () => filterRows(input));
}
