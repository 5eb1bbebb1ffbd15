// A box above each long table, such as that of refused pairs, which leaves the rows that have all words typed into it.
const LONG = 25; // rows
addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < LONG) continue;
    const box = Object.assign(document.createElement("input"), { type: "search", className: "filter", placeholder: `find in ${rows.length} rows: two settings, for example` });
    box.setAttribute("aria-label", "find rows");
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    });
    table.before(box);
  }
});
