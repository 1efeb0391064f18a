// What comes next: the shards that are needed soonest of those that are not here, and whatever else is on its way.

import { byId, make, say, table } from "./dom.js";
import { basename, neededIn, size } from "./words.js";

const MOST = 14;
const DOWNLOADING = "downloading from the object store";
const WORDS = {
  coming: "on its way",
  missing: "to be fetched",
  failed: "failed; fetched again when a reader asks",
};

const COLUMNS = [
  { name: "number", fill: fillNeed },
  { header: true, name: "name", fill: (cell, row) => titled(cell, basename(row.url), row.url) },
  { name: "name", fill: (cell, row) => titled(cell, row.job ?? "", row.job ? `${row.job}, user ${row.uid}` : "") },
  { name: "state", fill: fillState },
];

export function showComing({ gaps, transfers, lanes }) {
  const rows = rowsOf(gaps, transfers);
  const none = lanes.length ? "All that any job needs in the next five minutes is here." : "No job reads.";
  table(byId("coming-rows"), rows.slice(0, MOST), ({ url, job }) => `${url} ${job}`, COLUMNS, none);
  say(byId("coming-more"), rows.length > MOST ? `and ${rows.length - MOST} more` : "");
}

/** A row for each gap, with its transfer where it has one, and for each other transfer; the most urgent first. */
function rowsOf(gaps, transfers) {
  // Urls that are not shown are all called alike: each transfer is taken once.
  const left = new Set(transfers);
  const rows = gaps.map((gap) => {
    const transfer = transfers.find((each) => each.url === gap.url && left.has(each)) ?? null;
    left.delete(transfer);
    return { ...gap, transfer };
  });
  const others = [...left].map((transfer) => ({ in_s: transfer.needed_in_s, url: transfer.url, transfer }));
  return [...rows, ...others].sort((a, b) => urgency(a) - urgency(b) || 0); // where neither is planned, NaN
}

const isWaitedFor = ({ transfer }) => transfer?.class === "waiting";
const urgency = (row) => (isWaitedFor(row) ? -1 : row.in_s ?? Infinity);

function titled(cell, text, title) {
  say(cell, text);
  cell.title = title;
}

function fillNeed(cell, row) {
  say(cell, isWaitedFor(row) ? "waited for" : neededIn(row.in_s));
  cell.classList.toggle("waits", isWaitedFor(row));
}

function fillState(cell, { presence, transfer }) {
  if (!cell.firstChild) cell.append(make("progress", { "aria-label": "part that has arrived" }), make("span"));
  const [bar, text] = cell.children;
  bar.hidden = transfer === null;
  cell.className = transfer === null ? `state is-${presence}` : "state";
  if (transfer === null) say(text, WORDS[presence]);
  else fillProgress(bar, text, transfer);
  cell.title = text.textContent;
}

function fillProgress(bar, text, { done_bytes: done, total_bytes: total, rate_bytes_per_s: rate, stage }) {
  if (total) {
    bar.max = total;
    bar.value = done;
  } else bar.removeAttribute("value");
  const pace = rate ? `${size(rate)}/s` : "";
  const parts = [total ? `${size(done)} of ${size(total)}` : "", stage === DOWNLOADING ? pace : stage];
  say(text, parts.filter(Boolean).join(" · "));
}
