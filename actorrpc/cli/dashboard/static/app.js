// Logs in, shows the view that the address names, and passes on looks as they come: as events, or by asking where those do not come.

import { count, make } from "./dom.js";
import { save, saved, savedAnswer } from "./saved.js";
import { timelineView } from "./timeline.js";
import { actorsView, callsView, logsView, memoryView, nowView, stacksView, trainingView } from "./views.js";

const VIEWS = [
  ["now", "Now", nowView],
  ["actors", "Actors", actorsView],
  ["stacks", "Stacks", stacksView],
  ["timeline", "Timeline", timelineView],
  ["logs", "Logs", logsView],
  ["calls", "Calls", callsView],
  ["memory", "Memory", memoryView],
  ["training", "Training", trainingView],
];
const QUIET_MS = 5000; // a proxy that keeps events back is taken for one after so long

const main = document.getElementById("main");
const state = document.getElementById("state");
let view = null;
let name = "";
let last = null;
let locked = false;
let source = null;
let quiet = 0;
let polls = 0; // grows with each start and end of asking; the loop of an earlier one ends
let withoutEvents = false;
let answers = {}; // to the view that is shown, by path

function say(text) {
  if (state.textContent !== text) state.textContent = text;
}

// -- the server --------------------------------------------------------------------------------------------------

async function ask(path, parameters = {}) {
  if (saved !== null) return savedAnswer(path, parameters);
  const own = answers;
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== ""));
  try {
    const answer = await fetch(`${path}?${query}`, { signal: AbortSignal.timeout(15000) });
    if (answer.status === 401) lock(await answer.text());
    if (!answer.ok) return null;
    const found = await answer.json();
    own[path] = found;
    return found;
  } catch {
    say("actorrpc dashboard does not answer: has it ended?");
    return null;
  }
}

function lock(text) {
  locked = true;
  stop();
  view = null;
  main.replaceChildren(make("p", { class: "bad", role: "alert" }, text));
  say("Not logged in.");
}

function take(now) {
  last = now;
  document.getElementById("group").textContent = now.what ? `${now.what}${now.program ? ` (${now.program})` : ""}${now.pid ? `, pid ${now.pid}` : ""}` : "";
  const wrong = now.wrong_count || 0;
  const before = saved === null ? "" : `Saved at ${new Date(saved.when).toLocaleString()}: `;
  say(before + (now.problem ? "The group does not answer." : `${count(now.worker_count, "worker")}, ${count(now.actor_count, "actor")}; ${wrong ? `${wrong} wrong` : "nothing is wrong"}`));
  document.title = `${wrong || now.problem ? "! " : ""}actorrpc`;
  if (view !== null) view.update(now);
}

function start() {
  stop();
  if (locked || saved !== null || document.visibilityState === "hidden") return; // who does not look costs the job nothing
  if (withoutEvents) {
    poll(++polls);
    return;
  }
  source = new EventSource("api/events");
  const fail = () => {
    withoutEvents = true;
    start();
  };
  const wait = () => {
    clearTimeout(quiet);
    quiet = setTimeout(fail, QUIET_MS);
  };
  source.onmessage = (event) => {
    wait();
    take(JSON.parse(event.data));
  };
  source.onerror = () => {
    if (source !== null && source.readyState === EventSource.CLOSED) fail();
    else say("The connection was lost; trying again ...");
  };
  wait();
}

async function poll(own) {
  let after = 0;
  while (own === polls && !locked) {
    const now = await ask("api/now", { after });
    if (own !== polls) return;
    if (now !== null) {
      after = now.number;
      take(now);
    } else {
      after = 0; // it may be another server by now, which counts anew
    }
    await new Promise((resolve) => setTimeout(resolve, now === null ? 3000 : 200));
  }
}

function stop() {
  polls += 1;
  clearTimeout(quiet);
  if (source !== null) source.close();
  source = null;
}

// -- doing something ---------------------------------------------------------------------------------------------

// Asks whether it is meant, and has the server do it; then(text) is given what there is to say.
function confirmed(question, verb, what, whom, then) {
  const cancel = make("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Cancel");
  const go = make("button", { type: "button", class: "plain bad", onclick: run }, verb);
  const dialog = make("dialog", { "aria-label": verb }, make("p", {}, question), make("div", { class: "moves" }, go, cancel));
  const before = document.activeElement;
  async function run() {
    go.disabled = true;
    let text = "The server does not answer.";
    try {
      const answer = await fetch("api/act", {
        method: "POST", body: JSON.stringify({ do: what, whom }), signal: AbortSignal.timeout(30000),
        headers: { "Content-Type": "application/json", "X-Actorrpc-Action": "1" },
      });
      const found = answer.ok ? await answer.json() : { problem: await answer.text() };
      text = found.problem ? `Not done: ${found.problem}` : found.said;
    } catch {
      // said above
    }
    dialog.close();
    then(text);
  }
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (before !== null && before.isConnected) before.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  cancel.focus();
}

// -- views -------------------------------------------------------------------------------------------------------

function show() {
  const [wanted, query] = saved === null ? location.hash.slice(1).split("?", 2) : [saved.view, saved.parameters];
  const found = VIEWS.find(([each]) => each === wanted) || VIEWS[0];
  const moved = name !== "" && name !== found[0];
  name = found[0];
  document.getElementById("views").replaceChildren(...VIEWS.filter(([each]) => saved === null || each === name).map(([each, title]) =>
    make("a", { href: `#${each}`, "aria-current": each === name ? "page" : null }, title)));
  if (locked) return;
  main.replaceChildren();
  const own = name;
  answers = {};
  view = found[2](main, {
    ask,
    saved: saved !== null,
    confirmed,
    clock: () => (saved === null ? new Date() : new Date(saved.when)),
    parameters: new URLSearchParams(query || ""),
    remember(parameters) {
      if (saved !== null) return;
      const text = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "")).toString();
      history.replaceState(null, "", `#${own}${text ? `?${text}` : ""}`);
    },
  });
  main.setAttribute("aria-label", found[1]);
  if (moved) main.focus({ preventScroll: true });
  if (last !== null) view.update(last);
}

const keep = document.getElementById("save");
keep.hidden = saved !== null;
keep.addEventListener("click", async () => {
  keep.disabled = true;
  try {
    const parameters = location.hash.split("?", 2)[1] || "";
    await save(ask, answers, { view: name, parameters, now: last, when: new Date().toISOString() });
  } catch (error) {
    say(`This view could not be saved: ${error.message}`);
  }
  keep.disabled = false;
});

async function begin() {
  if (saved !== null) {
    document.body.classList.add("saved");
    show();
    if (saved.now !== null) take(saved.now);
    return;
  }
  if (location.hash.startsWith("#token=")) {
    const token = decodeURIComponent(location.hash.slice("#token=".length));
    history.replaceState(null, "", "#now"); // it is of no use any more, and need not be in the history
    try {
      const answer = await fetch("login", { method: "POST", body: token, headers: { "Content-Type": "text/plain" } });
      // Who reloads the link has a cookie already: then the first look says whether it is good.
      if (!answer.ok && (await ask("api/now")) === null && !locked) lock(await answer.text());
    } catch {
      say("actorrpc dashboard does not answer: has it ended?");
    }
  }
  show();
  start();
}

window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) location.reload();
  else show();
});
document.addEventListener("visibilitychange", start);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
begin();
