// DOM helpers. Text is inserted as text, never as markup: urls, job names and errors come from other users.

export const byId = (id) => document.getElementById(id);

/** Create an element; `children` are nodes or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set an element's text, but only if it differs: screen readers announce every change. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Give a parent one child per item, in order, reusing the children of items that remain.
 * `create(item)` makes a child; `fill(child, item)` updates it.
 */
export function sync(parent, items, key, create, fill) {
  const previous = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  const times = new Map(); // redacted items have equal keys, but each is an item of its own
  let place = parent.firstElementChild;
  for (const item of items) {
    const time = times.get(key(item)) ?? 0, name = `${time} ${key(item)}`;
    times.set(key(item), time + 1);
    const child = previous.get(name) ?? create(item);
    previous.delete(name);
    child.dataset.key = name;
    fill(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of previous.values()) child.remove();
}

/**
 * Fill a table's body with one row per item, or with the text `none` if there are none. `columns` are
 * { header, name, fill }: true for the row's header cell, its class, and `fill(cell, item)`.
 */
export function table(body, items, key, columns, none) {
  const rows = items.length ? items : [null];
  sync(body, rows, (item) => (item === null ? "" : key(item)), (item) => newRow(item, columns), (row, item) => {
    if (item === null) { setText(row.firstElementChild, none); return; }
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

/** Fill a definition list; `rows` are [term, definition…]. */
export function definitions(list, rows) {
  const create = ([name, ...texts]) => make("div", {}, make("dt", {}, name), ...texts.map(() => make("dd")));
  sync(list, rows, ([name]) => name, create, (item, [, ...texts]) => {
    texts.forEach((text, index) => setText(item.children[index + 1], text));
  });
}

/** A canvas's drawing context, sized to its displayed size and pixel density; null while it is hidden. */
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
/** A colour of the current theme, by the name of its custom property. */
export const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

/** Call back when all drawings must be redrawn: another theme, another size. */
export function onRedraw(callback) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", callback);
  addEventListener("resize", callback);
}

/** Make exactly those frames focusable that scroll sideways. */
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
