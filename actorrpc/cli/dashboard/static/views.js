// The views. Each is made with (element, context) and has update(now), which is called with each look.
// context: ask(path, parameters) -> what the server answers; parameters and remember(parameters): those in the page's address.

import { amount, count, figure, make, row, scrolling, span, table } from "./dom.js";

const stateOf = (text) => make("span", { class: /^alive$/i.test(text) ? "good" : /^(stopped|busy|dead|silent)$/i.test(text) ? "bad" : null }, text.toLowerCase());

// -- now ---------------------------------------------------------------------------------------------------------

const WORKERS = [
  { head: "rank", cell: (each) => (each.rank >= 0 ? String(each.rank) : ""), number: true },
  { head: "worker", cell: (each) => each.name },
  { head: "state", cell: (each) => stateOf(each.state) },
  { head: "pid", cell: (each) => String(each.pid || ""), number: true },
  { head: "host", cell: (each) => each.host },
  { head: "age", cell: (each) => (each.age ? span(each.age) : ""), number: true },
  { head: "cpu %", cell: (each) => (each.cpu === null ? "-" : each.cpu.toFixed(0)), number: true },
  { head: "memory", cell: (each) => (each.memory ? amount(each.memory) : ""), number: true },
  { head: "threads", cell: (each) => String(each.threads || ""), number: true },
  { head: "fds", cell: (each) => String(each.descriptors || ""), number: true },
  { head: "calls out", cell: (each) => String(each.outgoing), number: true },
  { head: "actors", cell: (each) => String(each.actors), number: true },
];

const CLASSES = [
  { head: "class", cell: (each) => make("a", { href: `#actors?q=${encodeURIComponent(each.name)}` }, each.name) },
  { head: "alive", cell: (each) => String(each.alive), number: true },
  { head: "dead", cell: (each) => String(each.dead), number: true },
  { head: "other", cell: (each) => String(each.other), number: true },
  { head: "waiting", cell: (each) => figure(each.waiting), number: true },
  { head: "running", cell: (each) => figure(each.running), number: true },
  { head: "oldest", cell: (each) => (each.oldest ? span(each.oldest) : "-"), number: true },
];

export function nowView(element, context) {
  const findings = make("div");
  const done = make("p", { role: "status" });
  let columns = WORKERS;
  let workers = table("Workers", columns);
  const workerBox = scrolling("Workers", true, workers.whole);
  const drain = {
    head: "do",
    cell: (each) => (each.rank > 0 && each.state === "alive" ? make("button", {
      type: "button", class: "plain", "aria-label": `Drain ${each.name}`,
      onclick: () => context.confirmed(`Drain worker ${each.name}? Nothing new is placed there; when its calls are over it leaves, and its ${count(each.actors, "actor")} move, begin anew or end, as their options say.`,
        "Drain", "drain", each.name, (text) => { done.textContent = text; }),
    }, "Drain ...") : null),
  };
  const classes = table("Actors by class", CLASSES);
  const more = make("p", { class: "faint" });
  const classHead = make("h2", {}, "Actors by class");
  const classBox = scrolling("Actors by class", false, classes.whole);
  element.append(
    make("h2", {}, "What is wrong"), findings,
    make("h2", {}, "Workers"), done, workerBox, more,
    classHead, classBox,
  );
  let links = "";
  let said = "";
  return {
    update(now) {
      const text = JSON.stringify([now.problem, now.findings]);
      if (text !== said) {
        said = text;
        findings.replaceChildren(...sayFindings(now));
      }
      if (now.actions && !context.saved && columns === WORKERS) {
        columns = [...WORKERS, drain];
        workers = table("Workers", columns);
        workerBox.replaceChildren(workers.whole);
      }
      if (!workers.body.contains(document.activeElement)) {
        workers.body.replaceChildren(...now.workers.map((each) => row(columns, each, { title: each.reason || null })));
      }
      const left = (now.worker_count || 0) - now.workers.length;
      more.textContent = left > 0 ? `... and ${count(left, "worker")} more, all alive` : "";
      classHead.hidden = classBox.hidden = now.classes.length === 0;
      // Rows with links stay as long as they show the same: one of them may have the focus.
      const shown = JSON.stringify(now.classes.map((each) => ({ ...each, oldest: each.oldest ? span(each.oldest) : "" })));
      if (shown !== links && !classes.body.contains(document.activeElement)) {
        links = shown;
        classes.body.replaceChildren(...now.classes.map((each) => row(CLASSES, each)));
      }
    },
  };
}

function sayFindings(now) {
  if (now.problem) return [make("p", { class: "bad" }, now.problem)];
  const items = now.findings.map((each) => make("li", { class: each.wrong ? "wrong" : null },
    each.wrong ? "" : "To know: ", each.what, each.remedy ? make("p", {}, `→ ${each.remedy}`) : null));
  const wrong = now.findings.some((each) => each.wrong);
  return [
    ...(wrong ? [] : [make("p", { class: "good" }, "Nothing is wrong.")]),
    ...(items.length ? [make("ul", { class: "findings" }, ...items)] : []),
  ];
}

// -- actors ------------------------------------------------------------------------------------------------------

const HEIGHT = 30; // of a row, as style.css has it
const BEYOND = 15; // rows that are made above and below of what is seen

const ACTORS = [
  { head: "actor", cell: (each) => each.title, sort: "title" },
  { head: "state", cell: (each) => stateOf(each.state) },
  { head: "worker", cell: (each) => each.worker },
  { head: "waiting", cell: (each) => figure(each.waiting), number: true, sort: "waiting" },
  { head: "oldest", cell: (each) => span(each.oldest), number: true, sort: "oldest" },
  { head: "calls/s", cell: (each) => figure(each.rate), number: true, sort: "rate" },
  { head: "p50", cell: (each) => span(each.p50), number: true, sort: "p50" },
  { head: "p99", cell: (each) => span(each.p99), number: true, sort: "p99" },
  { head: "done", cell: (each) => figure(each.done), number: true, sort: "done" },
  { head: "restarts", cell: (each) => String(each.restarts), number: true },
  { head: "runs", cell: (each) => (each.state === "DEAD" ? each.death : each.runs.join("; ") + (each.running > each.runs.length ? " ..." : "")) || "-" },
];

export function actorsView(element, context) {
  let sort = context.parameters.get("sort") || "waiting";
  const filter = make("input", { type: "search", id: "actor-filter", value: context.parameters.get("q") || "", oninput: changed });
  const said = make("p", { class: "faint", role: "status" });
  const box = scrolling("Actors", true);
  const done = make("p", { role: "status" });
  let columns = ACTORS;
  let body = null;
  let asked = 0;
  let shown = 0;
  let late = false;

  function choose(name) {
    sort = name;
    build();
    changed();
    box.querySelectorAll("th button")[columns.filter((each) => each.sort).findIndex((each) => each.sort === name)].focus();
  }

  function build() {
    const made = table("Actors", columns, { by: sort, choose });
    body = made.body;
    box.replaceChildren(made.whole);
  }

  function changed() {
    context.remember({ q: filter.value, sort: sort === "waiting" ? "" : sort });
    box.scrollTop = 0;
    ask();
  }

  async function ask() {
    const number = ++asked;
    const first = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - BEYOND);
    const most = Math.min(200, Math.ceil(box.clientHeight / HEIGHT) + 2 * BEYOND);
    const found = await context.ask("api/actors", { q: filter.value, sort, first, most });
    if (found === null || number < shown) return; // a later answer was there before
    shown = number;
    const space = (rows) => {
      const cell = make("td", { colspan: String(columns.length) });
      cell.style.height = `${rows * HEIGHT}px`;
      return make("tr", { class: "space", "aria-hidden": "true" }, cell);
    };
    const after = Math.max(0, found.matches - found.first - found.rows.length);
    body.parentElement.setAttribute("aria-rowcount", String(found.matches + 1));
    body.replaceChildren(
      space(found.first),
      ...found.rows.map((each, place) => row(columns, each, { class: "row", "aria-rowindex": String(found.first + place + 2) })),
      space(after),
    );
    const text = found.problem || `${count(found.matches, "actor")}${found.matches === found.total ? "" : ` of ${figure(found.total)}`}${found.age >= 1.5 ? `, as they were ${found.age.toFixed(0)} s ago` : ""}`;
    if (said.textContent !== text) said.textContent = text;
  }

  box.addEventListener("scroll", () => {
    if (late) return;
    late = true;
    setTimeout(() => { late = false; ask(); }, 60);
  });
  const act = (each, verb, what, question) => make("button", {
    type: "button", class: "plain", "aria-label": `${verb} ${each.title}`,
    onclick: () => context.confirmed(question, verb, what, each.id, (text) => { done.textContent = text; }),
  }, `${verb} ...`);
  const actions = {
    head: "do",
    cell: (each) => (each.state === "DEAD" ? null : make("span", {},
      act(each, "Kill", "kill", `Kill ${each.title}? It does not begin anew; its calls, ${figure(each.waiting)} of which wait, fail.`), " ",
      each.again ? act(each, "Restart", "restart", `End ${each.title}, and have it begin anew? Calls that run fail, or are repeated, as its options say.`) : null)),
  };
  element.append(make("form", { role: "search", onsubmit: (event) => event.preventDefault() },
    make("label", { for: "actor-filter" }, "Filter: actor, class, worker, state or id", filter)), said, done, box);
  build();
  return {
    update(now) {
      if (now.actions && !context.saved && columns === ACTORS) {
        columns = [...ACTORS, actions];
        build();
      }
      if (!body.contains(document.activeElement)) ask();
    },
  };
}

// -- stacks ------------------------------------------------------------------------------------------------------

export function stacksView(element, context) {
  const idle = make("input", { type: "checkbox", id: "idle", onchange: show });
  const take = make("button", { type: "button", class: "plain live", onclick: ask }, "Take stacks");
  const said = make("p", { class: "faint", role: "status" }, "Costs each worker a millisecond or two.");
  const list = make("div");
  let found = null;
  let taken = null;

  async function ask() {
    take.disabled = true;
    said.textContent = "Asking all workers ...";
    const answer = await context.ask("api/stacks");
    take.disabled = false;
    if (answer !== null) {
      found = answer;
      taken = context.clock();
      show();
    } else {
      said.textContent = "There was no answer.";
    }
  }

  function show() {
    if (found === null) return;
    if (found.problem) {
      said.textContent = found.problem;
      return;
    }
    const folds = found.folds.filter((each) => idle.checked || !each.idle);
    said.textContent = `${count(found.threads, "thread")} of ${count(found.workers, "worker")} at ${taken.toLocaleTimeString()}; `
      + `${count(found.folds.length - folds.length, "stack")} of threads that wait for work left out`;
    list.replaceChildren(
      ...found.silent.map((each) => make("p", { class: "bad" }, each)),
      ...folds.map((each, place) => foldOf(each, found, place < 3)),
      ...(found.coroutines.length ? [make("h2", {}, "Coroutines on no thread"), make("ul", {}, ...found.coroutines.map((each) => make("li", {}, each)))] : []),
      ...(found.left_out ? [make("p", { class: "faint" }, `... and ${found.left_out} more stacks: actorrpc stack shows all`)] : []),
    );
  }

  element.append(make("form", { onsubmit: (event) => event.preventDefault() }, take,
    make("label", { for: "idle", class: "inline" }, idle, "also threads that wait for work")), said, list);
  if (context.saved) ask();
  return { update() {} };
}

function foldOf(fold, all, open) {
  const head = fold.threads > 1 ? `${fold.threads} of ${all.threads} threads, on ${fold.workers} of ${all.workers} workers` : `1 thread: ${fold.who[0]}`;
  const where = fold.frames.length ? `: ${fold.frames[0][0]}` : "";
  const width = Math.min(50, Math.max(0, ...fold.frames.map((each) => each[0].length)));
  const lines = fold.frames.map(([name, file, line]) => `${name.padEnd(width)}  ${file}:${line}`);
  const who = fold.who.join(", ") + (fold.threads > fold.who.length ? ` and ${fold.threads - fold.who.length} more` : "");
  return make("details", { open }, make("summary", {}, head + where),
    fold.threads > 1 ? make("p", { class: "faint" }, who) : null,
    ...fold.calls.map((each) => make("p", {}, `runs ${each}`)),
    make("pre", { tabindex: "0" }, lines.join("\n")));
}

// -- logs --------------------------------------------------------------------------------------------------------

export function logsView(element, context) {
  const search = make("input", { type: "search", id: "log-text", value: context.parameters.get("q") || "", oninput: changed });
  const whom = make("input", { type: "search", id: "log-whom", value: context.parameters.get("whom") || "", oninput: changed });
  const said = make("p", { class: "faint", role: "status" });
  const lines = make("pre", { class: "log" });
  const box = scrolling("Lines", true, lines);
  let last = "";
  let asking = false;

  function changed() {
    context.remember({ q: search.value, whom: whom.value });
    ask();
  }

  async function ask() {
    if (asking) return; // the next look asks again
    asking = true;
    const found = await context.ask("api/logs", { q: search.value, whom: whom.value });
    asking = false;
    if (found === null) return;
    const told = found.problem || (found.matches > found.lines.length
      ? `the last ${found.lines.length} of ${count(found.matches, "line")}` : count(found.matches, "line"))
      + (found.matches === found.total ? "" : ` of ${figure(found.total)}`);
    if (said.textContent !== told) said.textContent = told;
    const text = found.lines.map((each) => {
      const time = each.time === null ? "" : new Date(1000 * each.time).toLocaleTimeString();
      return `${time} (${each.label} pid=${each.pid})${each.error ? " stderr" : ""} ${each.text}`;
    }).join("\n");
    if (text === last) return; // what is selected stays so
    last = text;
    const end = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    lines.textContent = text;
    if (end) box.scrollTop = box.scrollHeight;
  }

  element.append(make("form", { role: "search", onsubmit: (event) => event.preventDefault() },
    make("label", { for: "log-text" }, "Lines with", search),
    make("label", { for: "log-whom" }, "of (label or pid)", whom)), said, box);
  return { update: ask };
}

// -- calls -------------------------------------------------------------------------------------------------------

const CALLS = [
  { head: "method", cell: (each) => each.method },
  { head: "side", cell: (each) => (each.side === "client" ? "as callers see it" : "as it runs") },
  { head: "calls/s", cell: (each) => figure(each.rate), number: true },
  { head: "p50", cell: (each) => span(each.p50), number: true },
  { head: "p99", cell: (each) => span(each.p99), number: true },
  { head: "failed", cell: (each) => make("span", { class: each.failed ? "bad" : null }, figure(each.failed)), number: true },
  { head: "calls", cell: (each) => figure(each.count), number: true },
];

export function callsView(element, context) {
  const made = table("Calls by method", CALLS);
  const said = make("p", { class: "faint", role: "status" });
  element.append(make("p", { class: "faint" },
    "Those that the recorders had when somebody asked first, and all since; rates and percentiles are those of the last ten seconds, as far as buckets tell."),
    said, scrolling("Calls by method", true, made.whole));
  return {
    async update() {
      const found = await context.ask("api/calls");
      if (found === null) return;
      const text = found.problem || count(found.rows.length, "row");
      if (said.textContent !== text) said.textContent = text;
      made.body.replaceChildren(...found.rows.map((each) => row(CALLS, each)));
    },
  };
}

// -- memory ------------------------------------------------------------------------------------------------------

const MEMORY = [
  { head: "worker", cell: (each) => each.name },
  { head: "memory", cell: (each) => (each.memory ? amount(each.memory) : "-"), number: true },
  { head: "buffers", cell: (each) => amount(each.buffers), number: true },
  { head: "shared memory lent", cell: (each) => amount(each.lent), number: true },
  { head: "objects held", cell: (each) => amount(each.objects), number: true },
  { head: "RRefs owned", cell: (each) => figure(each.references), number: true },
  { head: "RRefs held", cell: (each) => figure(each.held), number: true },
];

const OBJECTS = [
  { head: "object", cell: (each) => each.label },
  { head: "made at", cell: (each) => each.site || "-" },
  { head: "memory", cell: (each) => amount(each.bytes), number: true },
  { head: "held by", cell: (each) => each.holders.join(", ") + (each.holder_count > each.holders.length ? ` and ${each.holder_count - each.holders.length} more` : "") },
];

const HOLDERS = [
  { head: "values of", cell: (each) => each.owner },
  { head: "referred to by", cell: (each) => each.holder },
  { head: "what", cell: (each) => each.what },
  { head: "references", cell: (each) => figure(each.references), number: true },
  { head: "memory", cell: (each) => (each.bytes ? amount(each.bytes) : "-"), number: true },
];

export function memoryView(element, context) {
  const made = table("Memory by worker", MEMORY);
  const objects = table("Large objects", OBJECTS);
  const holders = table("References", HOLDERS);
  const said = make("p", { class: "faint", role: "status" });
  let asking = false;
  element.append(make("p", { class: "faint" }, "Buffers: those that are in use and those that are kept for the next message. Objects: large ones, in memory that the workers of a host share."),
    scrolling("Memory by worker", false, made.whole),
    make("h2", {}, "Large objects"), said, scrolling("Large objects", false, objects.whole),
    make("h2", {}, "Who refers to whose values"), scrolling("References", false, holders.whole));
  return {
    async update(now) {
      made.body.replaceChildren(...now.workers.map((each) => row(MEMORY, each)));
      if (asking) return; // the next look asks again
      asking = true;
      const found = await context.ask("api/memory");
      asking = false;
      if (found === null) return;
      const text = found.problem || (found.object_count > found.objects.length
        ? `the ${found.objects.length} largest of ${figure(found.object_count)}` : count(found.object_count, "piece of shared memory", "pieces of shared memory"));
      if (said.textContent !== text) said.textContent = text;
      objects.body.replaceChildren(...found.objects.map((each) => row(OBJECTS, each)));
      holders.body.replaceChildren(...found.holders.map((each) => row(HOLDERS, each)));
    },
  };
}

// -- training ----------------------------------------------------------------------------------------------------

const CONTEXTS = [
  { head: "context", cell: (each) => each.context },
  { head: "of", cell: (each) => each.origin },
  { head: "workers", cell: (each) => String(each.workers), number: true },
  { head: "messages", cell: (each) => figure(each.messages), number: true },
  { head: "gradients", cell: (each) => figure(each.leaves), number: true },
  { head: "passes", cell: (each) => String(each.passes), number: true },
  { head: "last used", cell: (each) => (each.idle === null ? "-" : `${span(each.idle)} ago`), number: true },
];

const HOPS = [
  { head: "from", cell: (each) => each[0] },
  { head: "to", cell: (each) => each[1] },
  { head: "messages", cell: (each) => figure(each[2]), number: true },
];

const PASSES = [
  { head: "backward pass", cell: (each) => each.what },
  { head: "begun by", cell: (each) => each.worker },
  { head: "took", cell: (each) => span(each.took), number: true },
];

export function trainingView(element, context) {
  const contexts = table("Contexts of distributed autograd", CONTEXTS);
  const hops = table("Hops", HOPS);
  const passes = table("The last backward passes", PASSES);
  const said = make("p", { class: "faint", role: "status" });
  const told = make("p", { class: "faint", role: "status" });
  const take = make("button", { type: "button", class: "plain live", onclick: ask }, "Take the last passes");

  async function ask() {
    take.disabled = true;
    const found = await context.ask("api/timeline", {});
    take.disabled = false;
    if (found === null) return;
    const rows = found.slices.filter((each) => each[1] === 2 && found.texts[each[4]].startsWith("backward ")).reverse();
    told.textContent = found.problem || count(rows.length, "pass", "passes");
    passes.body.replaceChildren(...rows.slice(0, 100).map((each) => row(PASSES, {
      what: found.texts[each[4]].slice("backward ".length),
      worker: found.processes[found.lanes[each[0]][0]].name,
      took: (each[3] - each[2]) / 1e6,
    })));
  }

  element.append(
    make("h2", {}, "Contexts"), said, scrolling("Contexts of distributed autograd", false, contexts.whole),
    make("h2", {}, "Hops"), make("p", { class: "faint" }, "Messages with tensors that require grad, in the contexts that are alive: gradients go back the other way."),
    scrolling("Hops", false, hops.whole),
    make("h2", {}, "Backward passes"), make("form", { onsubmit: (event) => event.preventDefault() }, take), told,
    scrolling("The last backward passes", false, passes.whole),
  );
  if (context.saved) ask();
  return {
    update(now) {
      const training = now.training || { workers: [], contexts: [], hops: [] };
      const sum = (place) => training.workers.reduce((all, each) => all + each[place], 0);
      const text = now.problem || `${count(training.workers.length, "worker")} with ${count(sum(1), "context")}, ${count(sum(2), "pass", "passes")} under way`;
      if (said.textContent !== text) said.textContent = text;
      contexts.body.replaceChildren(...training.contexts.map((each) => row(CONTEXTS, each)));
      hops.body.replaceChildren(...training.hops.map((each) => row(HOPS, each)));
    },
  };
}
