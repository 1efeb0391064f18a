// DOM helpers and the formatting of figures. Text is inserted as text, never as markup: it comes
// from other users.

export const byId = (id) => document.getElementById(id);

/**
 * Set an element's text and tooltip, the text only if it differs: screen readers announce every
 * change.
 */
export function setText(element, text, title = element.title) {
  if (element.textContent !== text) element.textContent = text;
  element.title = title;
}

/** Set the texts of an element's first children. */
export function setTexts(element, texts) {
  texts.forEach((text, at) => setText(element.children[at], text));
}

/**
 * Give a list one child per item, in order: a copy of the template with the list's id and `-item`,
 * or the former child of the same item. `fill(child, item)` updates it.
 */
export function sync(list, items, key, fill) {
  const template = byId(`${list.id}-item`).content.firstElementChild;
  const previous = new Map(Array.from(list.children, (child) => [child.dataset.key, child]));
  const times = new Map(); // redacted items have equal keys, but each is an item of its own
  let place = list.firstElementChild;
  for (const item of items) {
    const time = times.get(key(item)) ?? 0;
    const name = `${time} ${key(item)}`;
    times.set(key(item), time + 1);
    const child = previous.get(name) ?? template.cloneNode(true);
    previous.delete(name);
    child.dataset.key = name;
    fill(child, item);
    if (child === place) {
      place = place.nextElementSibling;
    } else {
      list.insertBefore(child, place);
    }
  }
  for (const child of previous.values()) child.remove();
}

/**
 * Fill a table's body with one row per item, or show the text `none`; `fill(row, item, cells)`
 * updates a row.
 */
export function table(body, items, key, fill, none) {
  sync(body, items, key, (row, item) => fill(row, item, ...row.children));
  const { rows: [row] } = body.nextElementSibling;
  row.hidden = items.length > 0;
  setText(row.cells[0], none);
}

/**
 * A canvas's drawing context, sized to its displayed size and pixel density; null while it is
 * hidden.
 */
export function brush(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const density = window.devicePixelRatio || 1;
  const across = Math.round(width * density);
  const down = Math.round(height * density);
  if (canvas.width !== across || canvas.height !== down) { // to set a size clears the canvas
    canvas.width = across;
    canvas.height = down;
  }
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** A colour of the current theme, by the name of its custom property. */
export function colour(name) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(name).trim();
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const COUNT = new Intl.NumberFormat("en");

/** 12345678 → "12.3 MB", as `shardcache status` writes it. */
export function size(bytes) {
  let value = bytes;
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const isWhole = unit === 0 || Math.abs(value) >= 99.5;
  return `${isWhole ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** 75 → "1 min 15 s"; below ten seconds with one decimal. */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return pair(minutes, "min", whole % 60, "s");
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return pair(hours, "h", minutes % 60, "min");
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

function pair(large, unit, small, lesser) {
  if (small === 0) return `${large} ${unit}`;
  return `${large} ${unit} ${small} ${lesser}`;
}

export const number = (value) => COUNT.format(value);
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
export const percent = (part, whole) => `${Math.floor((100 * part) / whole)} %`;

export function neededIn(seconds) {
  if (seconds === null) return "not planned";
  return seconds < 0.5 ? "now" : duration(seconds);
}

/**
 * The end of a url, by which shards of one dataset differ; as much of it as no other one of `urls`
 * has.
 */
export function ending(url, urls = []) {
  const parts = (whole) => whole.replace(/[?#].*$/, "").split("/").filter(Boolean);
  const own = parts(url);
  const others = urls.filter((other) => other !== url).map(parts);
  const end = (all, length) => all.slice(-length).join("/");
  const isShared = (length) => others.some((other) => end(other, length) === end(own, length));
  let length = 1;
  while (length < own.length && isShared(length)) length += 1;
  return end(own, length);
}
