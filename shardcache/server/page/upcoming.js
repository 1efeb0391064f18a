// Upcoming shards: the missing shards that are needed soonest, then all other transfers.

import { byId, make, setText, table } from "./dom.js";
import { user } from "./waiting.js";
import { basename, neededIn, size } from "./words.js";

const MAX_ROWS = 14;
const DOWNLOADING = "downloading from the object store";
const WORDS = {
  fetching: "being fetched",
  missing: "to be fetched",
  failed: "failed; retried when a reader needs it",
};

const COLUMNS = [
  { name: "number", fill: fillNeed },
  { header: true, name: "name", fill: (cell, row) => titled(cell, basename(row.url), row.url) },
  { name: "name", fill: (cell, row) => titled(cell, row.job ?? "", row.job ? `${row.job}, ${user(row.uid)}` : "") },
  { name: "state", fill: fillState },
];

export function showUpcoming({ gaps, transfers, lanes }) {
  const rows = rowsOf(gaps, transfers);
  const none = lanes.length ? "All shards needed in the next five minutes are cached." : "No job is reading.";
  table(byId("upcoming-rows"), rows.slice(0, MAX_ROWS), ({ url, job }) => `${url} ${job}`, COLUMNS, none);
  setText(byId("upcoming-more"), rows.length > MAX_ROWS ? `and ${rows.length - MAX_ROWS} more` : "");
}

/** A row for each gap, with its transfer if there is one, and for each other transfer; the most urgent first. */
function rowsOf(gaps, transfers) {
  // Redacted urls are all equal: each transfer is used once.
  const left = new Set(transfers);
  const rows = gaps.map((gap) => {
    const transfer = transfers.find((each) => each.url === gap.url && left.has(each)) ?? null;
    left.delete(transfer);
    return { ...gap, transfer };
  });
  const others = [...left].map((transfer) => ({ in_s: transfer.needed_in_s, url: transfer.url, transfer }));
  return [...rows, ...others].sort((a, b) => urgency(a) - urgency(b) || 0); // NaN if neither is planned
}

const isWaitedFor = ({ transfer }) => transfer?.class === "waiting";
const urgency = (row) => (isWaitedFor(row) ? -1 : row.in_s ?? Infinity);

function titled(cell, text, title) {
  setText(cell, text);
  cell.title = title;
}

function fillNeed(cell, row) {
  setText(cell, isWaitedFor(row) ? "waiting" : neededIn(row.in_s));
  cell.classList.toggle("waits", isWaitedFor(row));
}

function fillState(cell, { presence, transfer }) {
  if (!cell.firstChild) cell.append(make("progress", { "aria-label": "downloaded so far" }), make("span"));
  const [bar, text] = cell.children;
  bar.hidden = transfer === null;
  cell.className = transfer === null ? `state is-${presence}` : "state";
  if (transfer === null) setText(text, WORDS[presence]);
  else fillProgress(bar, text, transfer);
  cell.title = text.textContent;
}

function fillProgress(bar, text, { done_bytes: done, total_bytes: total, rate_bytes_per_s: rate, stage, last_error: error }) {
  if (total) {
    bar.max = total;
    bar.value = done;
  } else bar.removeAttribute("value");
  const pace = rate ? `${size(rate)}/s` : "";
  const parts = [total ? `${size(done)} of ${size(total)}` : "", error || (stage === DOWNLOADING ? pace : stage)];
  setText(text, parts.filter(Boolean).join(" · "));
}
