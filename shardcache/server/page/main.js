// The page: follows the daemon's updates and shows them.

import { byId, onRedraw, reachScrolled, setText } from "./dom.js";
import { showUpcoming } from "./upcoming.js";
import { showJobs } from "./jobs.js";
import { CacheMap } from "./map.js";
import { TokenError, follow, setToken, takeToken } from "./stream.js";
import { showSummary } from "./summary.js";
import { Rates, showStores } from "./traffic.js";

const rates = new Rates(byId("rate"), byId("rate-text"));
const map = new CacheMap();
let last = null;

function show(moment) {
  byId("main").hidden = false;
  showSummary(moment, rates);
  showJobs(moment);
  showUpcoming(moment);
  showStores(moment);
  reachScrolled();
}

function onEvent(name, data) {
  if (name === "moment") {
    last = data;
    rates.take(data);
    show(data);
  } else if (name === "map") map.take(data);
}

function onLink(connected) {
  byId("link").classList.toggle("live", connected);
  setText(byId("link-text"), connected ? "live" : "the daemon does not answer; retrying");
}

async function run() {
  takeToken();
  for (;;) {
    try {
      await follow(onEvent, onLink);
    } catch (error) {
      if (!(error instanceof TokenError)) throw error;
      setToken(await askToken());
    }
  }
}

let asked = false;

/** Show the token form; return the token typed. */
function askToken() {
  const form = byId("token"), field = byId("token-text");
  byId("main").hidden = true;
  form.hidden = false;
  setText(byId("token-wrong"), asked ? "That was not the daemon's token." : "");
  asked = true;
  field.value = "";
  field.focus();
  return new Promise((done) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.hidden = true;
      done(field.value.trim());
    }, { once: true });
  });
}

onRedraw(() => {
  if (last !== null) show(last);
  rates.draw();
  map.arrange();
});

run();
