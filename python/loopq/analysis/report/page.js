"use strict";
// Sort by a column: numbers by the value in data-sort, empty cells last in either direction.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    const column = heads.slice(0, index).reduce((n, other) => n + other.colSpan, 0);
    head.querySelector("button")?.addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
      const body = table.tBodies[0];
      [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : Number(x) - Number(y);
        return rising ? order : -order;
      }).forEach((row) => body.append(row));
    });
  });
}
// Heat maps: one stop of the Tab key each, arrow keys from cell to cell, and the cell in words below the map.
for (const table of document.querySelectorAll("table.heat")) {
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1));
  const readout = table.closest("figure").querySelector(".readout");
  const show = (cell) => {
    if (cell?.tagName !== "TD" || !cell.textContent) return;
    const step = table.tHead.rows[0].cells[cell.cellIndex].textContent;
    const value = cell.textContent === "-" ? "not finite" : `${cell.textContent} ${table.dataset.unit}`;
    readout.textContent = `${cell.parentNode.cells[0].textContent}, step ${step}: ${value}`;
  };
  let current = rows[0][0];
  table.setAttribute("role", "grid");
  rows.flat().forEach((cell) => { cell.tabIndex = cell === current ? 0 : -1; });
  table.addEventListener("pointerover", (event) => show(event.target));
  table.addEventListener("focusin", (event) => show(event.target));
  table.addEventListener("keydown", (event) => {
    const y = rows.findIndex((row) => row.includes(event.target));
    if (y < 0) return;
    const x = rows[y].indexOf(event.target);
    const last = rows[y].length - 1;
    const to = {
      ArrowRight: [y, x + 1], ArrowLeft: [y, x - 1], ArrowDown: [y + 1, x], ArrowUp: [y - 1, x],
      Home: [y, 0], End: [y, last],
    }[event.key];
    const next = to && rows[to[0]]?.[to[1]];
    if (!to) return;
    event.preventDefault();
    if (!next) return;
    current.tabIndex = -1;
    current = next;
    current.tabIndex = 0;
    current.focus();
  });
}
// Offer the page's data for download.
document.querySelector("a.save").href = URL.createObjectURL(
  new Blob([document.getElementById("data").textContent], { type: "application/json" }),
);
