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
for (const heading of document.querySelectorAll("th")) {
  heading.querySelector("button").addEventListener("click", () => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = heading.closest("table").tBodies[0], column = heading.cellIndex;
    const rows = [...body.rows].sort((a, b) => order(value(a.cells[column]), value(b.cells[column])));
    body.append(...(down ? rows.reverse() : rows));
  });
}
// Charts, in the colours of the page: text and lines of a canvas do not follow its style.
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
        if (/Axis$|Grid$|^Legend$|^Title$/.test(model.type))
          for (const [name, colour] of Object.entries(wanted))
            if (name in model.properties) model[name] = colour;
}
async function draw() {
  const items = JSON.parse(document.getElementById("charts").textContent);
  await Promise.all(Object.entries(items).map(([place, item]) => Bokeh.embed.embed_item(item, place)));
  if (window.matchMedia("(pointer: coarse)").matches) // a finger on a chart scrolls the page
    for (const drawn of Bokeh.documents)
      for (const root of drawn.roots())
        for (const model of root.references()) if (model.type === "Toolbar") model.active_drag = null;
  paint();
  dark.addEventListener("change", paint);
  document.body.dataset.drawn = Object.keys(items).length;
}
if (document.getElementById("charts")) draw();
