"use strict";
// Sort by a column: numbers by the value in data-sort, empty cells last in either direction.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
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
// Offer the page's data for download.
const save = document.querySelector("a.save");
save.href = URL.createObjectURL(
  new Blob([document.getElementById("diagnosis").textContent], { type: "application/json" }),
);
