"use strict";
// Tables: a click on a heading sorts by it, another one the other way round.
function value(cell) {
  const text = cell.textContent.trim(), number = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(number) ? text : number;
}
function order(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === typeof b) return a.localeCompare(b);
  return typeof a === "number" ? -1 : 1; // words, such as "-", come last
}
for (const heading of document.querySelectorAll("th[aria-sort]")) {
  heading.querySelector("button").addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentNode.querySelectorAll("[aria-sort]")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = heading.closest("table").tBodies[0], column = heading.cellIndex;
    const rows = [...body.rows].sort((a, b) => order(value(a.cells[column]), value(b.cells[column])));
    body.append(...(down ? rows.reverse() : rows));
  });
}
// A table that is wider than its place becomes a list of rows, each a list of its cells.
for (const table of document.querySelectorAll("table"))
  for (const row of table.tBodies[0].rows)
    for (const cell of row.cells) cell.dataset.heading = table.tHead.rows[0].cells[cell.cellIndex].textContent.trim();
function fit() {
  for (const box of document.querySelectorAll(".scroll")) {
    box.classList.remove("rows");
    box.classList.toggle("rows", box.scrollWidth > box.clientWidth + 1);
  }
}
fit();
addEventListener("resize", fit);
// A printed chart keeps its size, and is then made as small as an A4 page needs it (in pixels of CSS). So is a table,
// whose text is three quarters as large on paper.
addEventListener("beforeprint", () => {
  for (const box of document.querySelectorAll(".chart > div")) {
    const { width, height } = box.getBoundingClientRect();
    box.style.setProperty("--width", `${width}px`);
    box.style.setProperty("--height", `${height}px`);
    box.style.setProperty("--fit", Math.min(1, 690 / width, 900 / height));
  }
  for (const table of document.querySelectorAll("table")) {
    table.parentElement.classList.remove("rows");
    table.style.width = "min-content";
    table.style.setProperty("--fit", Math.min(1, 690 / (0.75 * table.offsetWidth)));
    table.style.width = "";
  }
});
addEventListener("afterprint", fit);
// Charts, in the colours of the page: text and lines of a canvas do not follow its style.
const palette = JSON.parse(document.getElementById("dark")?.textContent ?? "{}"), light = {};
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function colours() {
  const style = getComputedStyle(document.documentElement);
  const [ink, quiet, line] = ["--ink", "--quiet", "--line"].map((name) => style.getPropertyValue(name).trim());
  return {
    axis_label_text_color: ink, major_label_text_color: quiet, axis_line_color: line, group_text_color: ink,
    major_tick_line_color: line, minor_tick_line_color: null, grid_line_color: line,
    separator_line_color: line, label_text_color: ink, text_color: ink,
  };
}
function paint() {
  const wanted = colours();
  document.body.classList.toggle("dark", dark.matches);
  for (const drawn of Bokeh.documents)
    for (const root of drawn.roots())
      for (const model of root.references())
        if (/Axis$|Grid$|^Legend$|^Title$/.test(model.type)) {
          for (const [name, colour] of Object.entries(wanted))
            if (name in model.properties) model[name] = colour;
        } else
          for (const name of ["line_color", "fill_color", "text_color"]) {
            if (!(name in model.properties)) continue;
            const given = (light[model.id + name] ??= model[name]), colour = palette[given?.value ?? given];
            if (colour) model[name] = dark.matches ? (given.value ? { value: colour } : colour) : given;
          }
}
async function draw() {
  const items = JSON.parse(document.getElementById("charts").textContent);
  await Promise.all(Object.entries(items).map(([place, item]) => Bokeh.embed.embed_item(item, place)));
  if (window.matchMedia("(pointer: coarse)").matches) // a finger on a chart scrolls the page
    for (const drawn of Bokeh.documents)
      for (const root of drawn.roots())
        for (const model of root.references()) if (model.type === "Toolbar") model.active_drag = null;
  paint();
  // Paper is light, but a canvas would be drawn too late for it: style.css turns its colours.
  dark.addEventListener("change", () => window.matchMedia("print").matches || paint());
  document.body.dataset.drawn = Object.keys(items).length;
}
if (document.getElementById("charts")) draw();
