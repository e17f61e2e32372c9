"use strict";
// The data of the page: `page.table(name)` gives the rows of a table, unpacked once.
const page = { data: JSON.parse(document.getElementById("data").textContent), views: {}, hovered: -1, cache: {} };

page.unpack = function (column, length) {
  if (column.values) return column.values;
  const found = new Array(length);
  let place = 0, value = 0;
  for (let i = 0; i < column.steps.length; i += 2) {
    for (let n = column.steps[i + 1]; n > 0; n--) {
      value += column.steps[i];
      found[place++] = column.texts ? column.texts[value] : value;
    }
  }
  return found;
};

page.table = function (name) {
  if (!page.cache[name]) {
    const packed = page.data.tables[name];
    const columns = packed.columns.map((column) => [column.name, page.unpack(column, packed.length)]);
    page.cache[name] = Array.from({ length: packed.length }, (_, i) =>
      Object.fromEntries(columns.map(([key, values]) => [key, values[i]])));
  }
  return page.cache[name];
};

// The rows that a chart shows, as copies: a chart writes into its rows.
page.rows = function (name, where) {
  const wanted = Object.entries(where).map(([key, values]) => [key, new Set(values)]);
  return page.table(name)
    .filter((row) => wanted.every(([key, values]) => values.has(row[key])))
    .map((row) => ({ ...row }));
};

page.shown = function (value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : String(+value.toPrecision(5));
};

// A table of any length: only the rows that can be seen are in the page.
page.showTable = function () {
  const box = document.getElementById("rows");
  if (!box) return;
  const [head, body, room] = [box.querySelector("thead"), box.querySelector("tbody"), document.getElementById("height")];
  const [choice, search] = [document.getElementById("table"), document.getElementById("search")];
  const HEIGHT = 26, MORE = 8;
  let names = [], rows = [], order = null, upwards = true;

  function compare(a, b) {
    const [x, y] = [a[order], b[order]];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;  // what has no value is last, either way
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (upwards ? 1 : -1);
  }

  function update() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = page.table(choice.value);
    names = all.length ? Object.keys(all[0]) : [];
    rows = all.filter((row) => {
      const text = names.map((name) => `${name.toLowerCase()}=${String(row[name]).toLowerCase()}`).join(" ");
      return words.every((word) => text.includes(word));
    });
    if (order !== null && names.includes(order)) rows = [...rows].sort(compare);
    document.getElementById("count").textContent = `${rows.length} of ${all.length} rows`;
    head.replaceChildren(document.createElement("tr"));
    for (const name of names) {
      const cell = document.createElement("th");
      cell.textContent = name.replaceAll("_", " ") + (name === order ? (upwards ? " ▲" : " ▼") : "");
      cell.scope = "col";
      if (rows.length && typeof rows[0][name] === "number") cell.className = "number";
      cell.tabIndex = 0;
      cell.setAttribute("aria-sort", name === order ? (upwards ? "ascending" : "descending") : "none");
      const sort = () => { upwards = order === name ? !upwards : true; order = name; update(); };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
      head.firstChild.append(cell);
    }
    box.scrollTop = 0;
    draw();
  }

  function draw() {
    const count = Math.ceil(box.clientHeight / HEIGHT) + MORE;
    const first = Math.max(0, Math.min(Math.floor(box.scrollTop / HEIGHT), rows.length - count + MORE));
    room.style.height = `${(rows.length + 2) * HEIGHT}px`;
    body.replaceChildren(...rows.slice(first, first + count).map((row) => {
      const line = document.createElement("tr");
      line.className = row.block === page.hovered ? "hovered" : "";
      for (const name of names) {
        const cell = document.createElement("td");
        cell.textContent = name === "head" && row[name] === -1 ? "" : page.shown(row[name]);  // −1: of no single head
        cell.title = String(row[name]);
        if (typeof row[name] === "number") cell.className = "number";
        line.append(cell);
      }
      return line;
    }));
  }

  function spell(value) {  // a text that a spreadsheet would take for a formula is no formula
    if (value === null || value === undefined) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function download(name, kind, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  document.getElementById("csv").addEventListener("click", () =>
    download(`${choice.value}.csv`, "text/csv",
      [names, ...rows.map((row) => names.map((name) => row[name]))].map((line) => line.map(spell).join(",")).join("\n") + "\n"));
  document.getElementById("json").addEventListener("click", () =>
    download(`${choice.value}.json`, "application/json", JSON.stringify(rows)));
  choice.addEventListener("change", () => { order = null; update(); });
  search.addEventListener("input", update);
  box.addEventListener("scroll", draw);
  page.drawTable = draw;
  update();
};
