// What the daemon tells, event by event, for as long as the page is looked at.
//
// Not EventSource: that can bring no token but in the address, where logs and histories keep it.

const KEY = "shardcache.token";
const PAUSES_S = [0.5, 1, 2, 5];

/** Take the token that the address carries behind its #, which browsers send to nobody; then clean the address. */
export function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found === null) return;
  sessionStorage.setItem(KEY, found);
  history.replaceState(null, "", location.pathname + location.search);
}

export const setToken = (text) => sessionStorage.setItem(KEY, text);

/** The daemon wants a token, or another one. */
export class TokenError extends Error {}

/**
 * Follow the daemon. `hear` is called with each event's name and data, `tell` with whether there is a connection.
 * `since` returns what to ask for. Returns, by a TokenError, only when a token is needed.
 */
export async function follow(hear, tell, since) {
  for (let failures = 0; ; ) {
    await shown();
    try {
      await once((name, data) => { failures = 0; tell(true); hear(name, data); }, since());
    } catch (error) {
      if (error instanceof TokenError) throw error;
      if (document.hidden) continue;
      tell(false);
      await pause(PAUSES_S[Math.min(failures, PAUSES_S.length - 1)]);
      failures += 1;
    }
  }
}

async function once(hear, since) {
  const token = sessionStorage.getItem(KEY), stop = new AbortController();
  const hide = () => document.hidden && stop.abort();
  document.addEventListener("visibilitychange", hide);
  try {
    const url = `dashboard/live?since=${encodeURIComponent(since)}`;
    const answer = await fetch(url, { headers: token ? { Authorization: `Bearer ${token}` } : {}, signal: stop.signal, cache: "no-store" });
    if (answer.status === 401) throw new TokenError();
    if (!answer.ok) throw new Error(`the daemon answered ${answer.status}`);
    await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), hear);
  } finally {
    document.removeEventListener("visibilitychange", hide);
  }
}

async function read(reader, hear) {
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
      hear(name, JSON.parse(data));
    }
  }
}

const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

/** A page that nobody looks at asks nothing. */
async function shown() {
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}
