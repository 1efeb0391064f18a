// The few things done to the document. Text goes in as text: urls, jobs and errors are written by others.

export const byId = (id) => document.getElementById(id);

/** Make an element; `children` are nodes or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set an element's text, and leave it alone where that is what it says: screen readers read what changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Let a parent have one child an item, in order, keeping those of items that stay.
 * `create(item)` makes one; `fill(child, item)` brings it up to date.
 */
export function sync(parent, items, key, create, fill) {
  const former = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  const times = new Map(); // what is hidden is all called alike, and yet each is an item of its own
  let place = parent.firstElementChild;
  for (const item of items) {
    const time = times.get(key(item)) ?? 0, name = `${time} ${key(item)}`;
    times.set(key(item), time + 1);
    const child = former.get(name) ?? create(item);
    former.delete(name);
    child.dataset.key = name;
    fill(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of former.values()) child.remove();
}

/**
 * Fill a table's body with a row an item, or with `none` where there is no item. `columns` are { header, name, fill }:
 * whether the cell is the row's header, its class, and `fill(cell, item)`.
 */
export function table(body, items, key, columns, none) {
  const rows = items.length ? items : [null];
  sync(body, rows, (item) => (item === null ? "" : key(item)), (item) => newRow(item, columns), (row, item) => {
    if (item === null) { say(row.firstElementChild, none); return; }
    columns.forEach(({ fill }, index) => fill(row.children[index], item));
  });
}

function newRow(item, columns) {
  if (item === null) return make("tr", {}, make("td", { class: "empty", colspan: columns.length }));
  const cells = columns.map(({ header, name }) => {
    const attributes = name ? { class: name } : {};
    return header ? make("th", { ...attributes, scope: "row" }) : make("td", attributes);
  });
  return make("tr", {}, ...cells);
}

/** Fill a list of definitions; `rows` are [term, definition…]. */
export function definitions(list, rows) {
  const create = ([name, ...texts]) => make("div", {}, make("dt", {}, name), ...texts.map(() => make("dd")));
  sync(list, rows, ([name]) => name, create, (item, [, ...texts]) => {
    texts.forEach((text, index) => say(item.children[index + 1], text));
  });
}

/** A canvas as large as it is shown, on screens of any density; null while it is not shown. */
export function brush(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth, density = window.devicePixelRatio || 1;
  if (!width || !height) return null;
  const across = Math.round(width * density), down = Math.round(height * density);
  if (canvas.width !== across || canvas.height !== down) { canvas.width = across; canvas.height = down; }
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const root = document.documentElement;
/** A colour of the present theme, by the name of its custom property. */
export const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

/** Call back when everything that is drawn has to be drawn anew: another theme, another size. */
export function onRedraw(callback) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", callback);
  addEventListener("resize", callback);
}

/** Let what scrolls sideways be reached by keyboard, and nothing else. */
export function reachScrolled() {
  for (const frame of document.querySelectorAll(".wide")) {
    const scrolls = frame.scrollWidth > frame.clientWidth + 1;
    if (scrolls === frame.hasAttribute("tabindex")) continue;
    const section = frame.closest("section");
    if (scrolls) {
      frame.tabIndex = 0;
      frame.setAttribute("role", "group");
      frame.setAttribute("aria-label", section.querySelector("h2").textContent);
    } else ["tabindex", "role", "aria-label"].forEach((name) => frame.removeAttribute(name));
  }
}
