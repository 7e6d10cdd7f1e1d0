// Views as files: one file has the page's own script, its style and what one view was shown, and asks nobody for anything. What a job says
// is in it as JSON, in which no markup can begin; the file's own policy lets no other script run.

const MOST = 2000; // that a file has at most
const PAGE = 200;

const place = document.getElementById("saved");
// What this file was saved with: {view, parameters, now, answers, when}; null where this is the page itself.
export const saved = place === null ? null : JSON.parse(place.textContent);

// What the server has answered to the view that was saved.
export function savedAnswer(path, parameters) {
  const found = saved.answers[path];
  if (found === undefined) return null;
  if (path === "api/actors") return actorsOf(found, parameters);
  if (path === "api/logs") return linesOf(found, parameters);
  return found;
}

function actorsOf(found, { q = "", sort, first = 0, most = PAGE }) {
  const text = q.toLowerCase();
  const rows = found.rows.filter((each) => [each.title, each.class, each.worker, each.state, each.id].join("\n").toLowerCase().includes(text));
  if (sort === "title") rows.sort((one, other) => (one.title < other.title ? -1 : 1));
  else rows.sort((one, other) => (other[sort] || 0) - (one[sort] || 0));
  return { ...found, matches: rows.length, first, rows: rows.slice(first, first + most) };
}

function linesOf(found, { q = "", whom = "" }) {
  const has = (text, part) => text.toLowerCase().includes(part.toLowerCase());
  const lines = found.lines.filter((each) => has(each.text, q) && has(`${each.label} ${each.pid}`, whom));
  return { ...found, lines, matches: lines.length };
}

// Offers a view as a file. ask: asks the server; answers: what it has answered to this view; made: what else the file is to have.
export async function save(ask, answers, made) {
  const answer = await fetch("offline.txt", { signal: AbortSignal.timeout(15000) });
  if (!answer.ok) throw new Error(`the server has answered ${answer.status}`);
  const shell = await answer.text();
  const kept = { ...made, answers: { ...answers } };
  if (made.view === "actors") kept.answers["api/actors"] = await allActors(ask, new URLSearchParams(made.parameters));
  const mark = "application/json\">";
  const at = shell.indexOf(mark) + mark.length;
  const data = JSON.stringify(kept).replaceAll("<", "\\u003c");
  const url = URL.createObjectURL(new Blob([shell.slice(0, at), data, shell.slice(at)], { type: "text/html" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `actorrpc-${made.view}-${made.when.slice(0, 19).replaceAll(":", "")}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

async function allActors(ask, parameters) {
  const rows = [];
  let found = null;
  do {
    const page = await ask("api/actors", { q: parameters.get("q") || "", sort: parameters.get("sort") || "waiting", first: rows.length, most: PAGE });
    if (page === null) throw new Error("the server does not answer");
    found = page;
    rows.push(...page.rows);
    if (page.rows.length < PAGE) break;
  } while (rows.length < MOST);
  return { ...found, first: 0, rows: rows.slice(0, MOST) };
}
