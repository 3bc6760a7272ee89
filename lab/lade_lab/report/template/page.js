"use strict";

const $ = (id) => document.getElementById(id);
const read = (id) => JSON.parse($(id).textContent);

/* Colours: as the system has them, or chosen. */
{
  const button = $("theme");
  const choices = ["auto", "light", "dark"];
  const names = { auto: "as the system has them", light: "light", dark: "dark" };
  let chosen = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % choices.length;
    const name = choices[chosen];
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `◐ ${name}`;
    button.setAttribute("aria-label", `Colours: ${names[name]}`);
  });
}

/* The figures as a file. */
{
  const link = $("data");
  link.href = URL.createObjectURL(new Blob([$("summary").textContent], { type: "application/json" }));
  link.hidden = false;
}

/* Tables that sort by the column clicked on. */
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent.replace(/[▼≠≈%\s]/g, "");
    const figure = Number(text);
    return text !== "" && Number.isFinite(figure) ? figure : text;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return a.localeCompare(b, undefined, { numeric: true });
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (down ? -1 : 1) * compare(value(a, column), value(b, column)));
      table.tBodies[0].append(...rows);
    });
  });
}
