// The daemon's event stream, followed while the page is visible.
//
// Not EventSource: it can send a token only in the address, which ends up in logs and histories.

const KEY = "shardcache.token";
const PAUSES_S = [0.5, 1, 2, 5];

/** Take the token from the address's fragment, which browsers never send, and remove it from the address. */
export function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found === null) return;
  sessionStorage.setItem(KEY, found);
  history.replaceState(null, "", location.pathname + location.search);
}

export const setToken = (text) => sessionStorage.setItem(KEY, text);

/** The token is missing or wrong. */
export class TokenError extends Error {}

/**
 * Follow the daemon. `onEvent` is called with each event's name and data, `onLink` with true while connected, else false.
 * Ends only with a TokenError, when a token is needed.
 */
export async function follow(onEvent, onLink) {
  for (let failures = 0; ; ) {
    await shown();
    try {
      await once((name, data) => { failures = 0; onLink(true); onEvent(name, data); });
    } catch (error) {
      if (error instanceof TokenError) throw error;
      if (document.hidden) continue;
      onLink(false);
      await pause(PAUSES_S[Math.min(failures, PAUSES_S.length - 1)]);
      failures += 1;
    }
  }
}

async function once(onEvent) {
  const token = sessionStorage.getItem(KEY), stop = new AbortController();
  const hide = () => document.hidden && stop.abort();
  document.addEventListener("visibilitychange", hide);
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch("dashboard/live", { headers, signal: stop.signal, cache: "no-store" });
    if (answer.status === 401) throw new TokenError();
    if (!answer.ok) throw new Error(`the daemon answered ${answer.status}`);
    await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), onEvent);
  } finally {
    document.removeEventListener("visibilitychange", hide);
  }
}

async function read(reader, onEvent) {
  let pieces = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pieces.push(value);
    if (!value.includes("\n")) continue;
    const blocks = pieces.join("").split("\n\n");
    pieces = [blocks.pop()];
    for (const block of blocks) {
      const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(block);
      onEvent(name, JSON.parse(data));
    }
  }
}

const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

/** Wait until the page is visible: a hidden page sends no requests. */
async function shown() {
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}
