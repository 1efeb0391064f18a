// The page: follows the daemon's event stream while it is visible, and shows what it says.
//
// Not EventSource: it can send a token only in the address, which ends up in logs and histories.

import { byId, setText } from "./dom.js";
import { showJobs, showUpcoming } from "./jobs.js";
import { Rates, showStores, showSummary } from "./summary.js";
import { shortOfData } from "./waits.js";

const KEY = "shardcache.token";
const PAUSES_S = [0.5, 1, 2, 5];

const reasons = new Map(); // by job, what it last waited for
const rates = new Rates();
let last = null;

function show(moment) {
  byId("main").hidden = false;
  const short = shortOfData(moment, reasons);
  showSummary(moment, rates, short);
  showJobs(moment, short);
  showUpcoming(moment);
  showStores(moment);
  // Exactly those frames can have the focus that scroll sideways.
  for (const frame of document.querySelectorAll(".wide")) {
    if (frame.scrollWidth > frame.clientWidth + 1) {
      frame.tabIndex = 0;
    } else {
      frame.removeAttribute("tabindex");
    }
  }
}

function onEvent(name, data) {
  onLink(true);
  if (name !== "moment") return;
  last = data;
  rates.take(data);
  show(data);
}

function onLink(connected) {
  byId("link").classList.toggle("live", connected);
  setText(byId("link-text"), connected ? "live" : "the daemon does not answer; retrying");
}

/** Draw again, in another theme or size. */
function redraw() {
  if (last !== null) show(last);
}

async function run() {
  takeToken();
  for (let failures = 0; ;) {
    // A hidden page sends no requests.
    while (document.hidden) await once(document, "visibilitychange");
    try {
      await follow((name, data) => {
        failures = 0;
        onEvent(name, data);
      });
    } catch {
      if (document.hidden) continue;
      onLink(false);
      const pauseS = PAUSES_S[Math.min(failures, PAUSES_S.length - 1)];
      await new Promise((done) => setTimeout(done, 1000 * pauseS));
      failures += 1;
    }
  }
}

/**
 * Take the token from the address's fragment, which browsers never send, and remove it from the
 * address.
 */
function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found === null) return;
  sessionStorage.setItem(KEY, found);
  history.replaceState(null, "", location.pathname + location.search);
}

/** Show the token form until a token has been typed. */
async function askToken() {
  const form = byId("token");
  const field = byId("token-text");
  byId("main").hidden = true;
  form.hidden = false;
  field.value = "";
  field.focus();
  await once(form, "submit");
  sessionStorage.setItem(KEY, field.value.trim());
  form.hidden = true;
  // This is read when the form is shown again.
  setText(byId("token-wrong"), "That was not the daemon's token.");
}

function once(target, event) {
  return new Promise((done) => target.addEventListener(event, done, { once: true }));
}

/** Read the stream once; `take` is called with each event's name and data. */
async function follow(take) {
  const token = sessionStorage.getItem(KEY);
  const stop = new AbortController();
  const hide = () => document.hidden && stop.abort();
  document.addEventListener("visibilitychange", hide);
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const options = { headers, signal: stop.signal, cache: "no-store" };
    const answer = await fetch("dashboard/live", options);
    if (answer.status === 401) {
      await askToken();
    } else if (answer.ok) {
      await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), take);
    } else {
      throw new Error(`the daemon answered ${answer.status}`);
    }
  } finally {
    document.removeEventListener("visibilitychange", hide);
  }
}

async function read(reader, take) {
  for (let pieces = []; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    pieces.push(value);
    if (!value.includes("\n")) continue;
    const blocks = pieces.join("").split("\n\n");
    pieces = [blocks.pop()];
    for (const block of blocks) {
      const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(block);
      take(name, JSON.parse(data));
    }
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
byId("token").addEventListener("submit", (event) => event.preventDefault());
run();
