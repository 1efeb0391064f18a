// Formatting of sizes, times and counts.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const COUNT = new Intl.NumberFormat("en");

/** 12345678 → "12.3 MB", as `shardcache status` writes it. */
export function size(bytes) {
  let value = bytes, unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
  return `${unit === 0 || value >= 99.5 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** 75 → "1 min 15 s"; below ten seconds with one decimal. */
export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  if (minutes < 60) return pair(minutes, "min", whole % 60, "s");
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? pair(hours, "h", minutes % 60, "min") : pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

const pair = (large, unit, small, lesser) => (small ? `${large} ${unit} ${small} ${lesser}` : `${large} ${unit}`);

export const number = (value) => COUNT.format(value);
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
export const percent = (part, whole) => `${Math.floor((100 * part) / whole)} %`;
export const neededIn = (seconds) => (seconds === null ? "not planned" : seconds < 0.5 ? "now" : duration(seconds));
export const pace = (perSecond) => (perSecond === 0 ? "–" : perSecond < 10 ? perSecond.toPrecision(2) : number(Math.round(perSecond)));

/** The end of a url, by which shards of one dataset differ. */
export const basename = (url) => url.replace(/[?#].*$/, "").split("/").filter(Boolean).pop() ?? url;
