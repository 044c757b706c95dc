"use strict";

// "1,234 [1,200, 1,260]" sorts by its first number, text by the alphabet.
function sortKey(text) {
  const match = /^[~+]?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)/i.exec(text.trim());
  return match ? parseFloat(match[1].replaceAll(",", "")) : text.trim();
}

// Numbers, then words ("oom" in a column of times), then nothing: whichever way a column is sorted.
function place(key) {
  if (typeof key === "number") return 0;
  return key === "" || key === "–" ? 2 : 1;
}

function compare(a, b, sign) {
  if (place(a) !== place(b)) return place(a) - place(b);
  return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
}

function sortBy(header) {
  const table = header.closest("table");
  const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of header.parentElement.querySelectorAll("[aria-sort]")) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [sortKey(row.cells[header.cellIndex].textContent), row]);
  keyed.sort((a, b) => compare(a[0], b[0], sign));
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

async function showSource(id) {
  sources ??= readSources();
  const source = (await sources)[id];
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

// JSON by record, packed with gzip; unpacked where somebody first asks for one.
async function readSources() {
  const packed = document.getElementById("sources").textContent;
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).json();
}
let sources;
document.addEventListener("click", (event) => {
  const source = event.target.closest("button.source");
  if (source) return showSource(source.dataset.record);
  const button = event.target.closest("table.sortable th button");
  if (button) sortBy(button.closest("th"));
});
for (const input of document.querySelectorAll(".filter")) {
  input.addEventListener("input", () => filterRows(input));
}

function markCut() { // what goes on to the right, or below, says so
  for (const box of document.querySelectorAll(".scroll, figure")) {
    box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
    box.classList.remove("tall"); // whose words have a height, too
    box.classList.toggle("tall", box.scrollHeight > box.clientHeight + 1);
  }
}
markCut();
window.addEventListener("resize", markCut);
