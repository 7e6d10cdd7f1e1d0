// The view of the timeline: the calls of all workers on a canvas, with a track for each worker's calls and each of its actors, and arrows
// from a call to its execution and back to the answer. What the canvas shows is said in words below it, and in a table.

import { count, make, row, scrolling, span, table } from "./dom.js";

const AXIS = 20; // heights, in pixels
const PROCESS = 22;
const TITLE = 15;
const LANE = 16;
const ARROWS = 400; // more of them at once say nothing
const NEAR = 5; // pixels that a finger may miss by
const LEAST = 5; // microseconds that the whole width may stand for
const [LANE_AT, KIND, BEGUN, ENDED, TEXT, FAILED, WAITED, OTHER, UNFINISHED] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const CALLED = 0;
const EXECUTED = 1;

const SPANS = [["5", "5 s"], ["30", "30 s"], ["300", "5 min"], ["", "all that is kept"]];

export function timelineView(element, context) {
  const choice = make("select", { id: "timeline-seconds", onchange: take },
    ...SPANS.map(([value, text]) => make("option", { value, selected: value === (context.parameters.get("seconds") || "30") }, text)));
  const button = make("button", { type: "button", class: "plain live", onclick: take }, "Take the last calls");
  const file = make("a", { class: "plain live", download: "actorrpc-trace.json" }, "File for Perfetto");
  const moves = [
    ["Earlier", "◀", () => pan(-0.4)], ["Later", "▶", () => pan(0.4)],
    ["Closer", "+", () => zoom(0.5, 0.5)], ["Further away", "−", () => zoom(2, 0.5)], ["All of it", "all", all],
  ].map(([label, text, onclick]) => make("button", { type: "button", class: "plain", "aria-label": label, onclick }, text));
  const said = make("p", { class: "faint", role: "status" });
  const canvas = make("canvas", { role: "img", "aria-label": "Timeline of calls" });
  const inner = make("div", { class: "timeline" }, canvas);
  const box = scrolling("Timeline; arrow keys, plus and minus move it", false, inner);
  box.classList.add("timeline-box");
  const told = make("p", { role: "status", class: "told" }, "Tap a call to see what it is.");
  const slowest = make("div");
  let found = null;
  let lanes = []; // where each lane is drawn
  let titles = []; // [y, text, is a process]
  let from = 0;
  let width = 1; // microseconds that are shown
  let end = 1;
  let chosen = -1;
  let frame = 0;
  let dark = null;

  // -- what is shown ---------------------------------------------------------------------------------------------

  async function take() {
    const seconds = choice.value;
    context.remember({ seconds: seconds === "30" ? "" : seconds });
    file.setAttribute("href", `api/trace${seconds ? `?seconds=${seconds}` : ""}`);
    button.disabled = true;
    const answer = await context.ask("api/timeline", { seconds });
    button.disabled = false;
    if (answer === null) {
      said.textContent = "There was no answer.";
      return;
    }
    found = answer;
    chosen = -1;
    place();
    all();
    say();
  }

  function place() {
    lanes = [];
    titles = [];
    let y = AXIS;
    let process = -1;
    let title = "";
    for (const [number, name] of found.lanes) {
      if (number !== process) {
        const one = found.processes[number];
        titles.push([y, `${one.name} (pid ${one.pid})${one.more ? ": its last calls only" : ""}`, true]);
        y += PROCESS;
        process = number;
        title = "";
      }
      if (name !== title) {
        titles.push([y, name, false]);
        y += TITLE;
        title = name;
      }
      lanes.push(y);
      y += LANE;
    }
    inner.style.height = `${y + 6}px`;
    end = found.slices.reduce((most, each) => Math.max(most, each[ENDED]), 1);
  }

  function say() {
    const parts = [
      found.problem || `${count(found.slices.length, "slice")} of ${count(found.processes.length, "worker")}, ${count(found.arrows, "arrow")}, ${time(end)} in all`,
      found.left_out ? `${count(found.left_out, "older record")} left out` : "",
      found.clock_error ? `the clocks of the hosts are compared to within ${time(1e6 * found.clock_error)}` : "",
      ...found.missing.map((each) => `missing: ${each}`),
    ];
    said.textContent = parts.filter((each) => each).join("; ");
    canvas.setAttribute("aria-label", `Timeline: ${said.textContent}`);
    const order = found.slices.map((_, number) => number).filter((number) => found.slices[number][KIND] === EXECUTED);
    const internal = (number) => titleOf(number) === "internal functions";
    order.sort((one, other) => internal(one) - internal(other) || length(other) - length(one));
    const columns = [
      { head: "the longest", cell: (number) => make("button", { type: "button", class: "plain", onclick: () => choose(number, true) }, nameOf(number)) },
      { head: "worker", cell: (number) => found.processes[found.lanes[found.slices[number][LANE_AT]][0]].name },
      { head: "ran", cell: (number) => time(length(number)), number: true },
      { head: "waited", cell: (number) => time(found.slices[number][WAITED]), number: true },
    ];
    const made = table("The longest executions", columns);
    made.body.replaceChildren(...order.slice(0, 10).map((number) => row(columns, number)));
    slowest.replaceChildren(...(order.length ? [scrolling("The longest executions", false, made.whole)] : []));
  }

  const titleOf = (number) => found.lanes[found.slices[number][LANE_AT]][1];
  const length = (number) => found.slices[number][ENDED] - found.slices[number][BEGUN];
  const time = (microseconds) => span(microseconds / 1e6);

  const textOf = (each) => `${found.texts[each[TEXT]]}${each[UNFINISHED] ? " (unfinished)" : ""}`;

  function nameOf(number) {
    const each = found.slices[number];
    const text = textOf(each);
    const title = titleOf(number);
    return each[KIND] === EXECUTED && !/functions$|other actors$/.test(title) ? `${title}.${text}` : text;
  }

  function choose(number, move) {
    chosen = number;
    if (number >= 0) {
      const each = found.slices[number];
      const worker = found.processes[found.lanes[each[LANE_AT]][0]].name;
      const verb = each[KIND] === CALLED ? "call of" : each[KIND] === EXECUTED ? "execution of" : "";
      const waits = each[WAITED] ? ` after ${time(each[WAITED])} in the mailbox` : "";
      const other = each[OTHER];
      const there = other >= 0
        ? `; ran for ${time(length(other))} on ${found.processes[found.lanes[found.slices[other][LANE_AT]][0]].name}, which it had reached and begun on after ${time(found.slices[other][BEGUN] - each[BEGUN])}`
        : "";
      told.textContent = `${verb} ${nameOf(number)} on ${worker}: ${time(length(number))}${waits}${each[FAILED] ? ", failed" : ""}${there}${each[BEGUN] < 0 ? "" : `; at ${time(each[BEGUN])}`}`.trim();
      if (move) {
        const wide = Math.max(LEAST, 3 * (length(number) + each[WAITED]));
        look((each[BEGUN] + each[ENDED] - wide) / 2, wide);
        box.scrollTop = lanes[each[LANE_AT]] - box.clientHeight / 2;
      }
    } else {
      told.textContent = "Tap a call to see what it is.";
    }
    redraw();
  }

  // -- moving ----------------------------------------------------------------------------------------------------

  function look(begin, wide) {
    width = Math.min(Math.max(wide, LEAST), 1.1 * end);
    from = Math.min(Math.max(begin, -0.05 * end), 1.05 * end - width);
    redraw();
  }

  function all() {
    look(-0.02 * end, 1.04 * end);
  }

  const pan = (share) => look(from + share * width, width);
  const zoom = (factor, at) => look(from + at * width * (1 - factor), width * factor);

  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event);
    if (pointers.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before === undefined || found === null) return;
    const wide = canvas.clientWidth;
    if (pointers.size === 1) {
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (moved > NEAR) look(from - ((event.clientX - before.clientX) / wide) * width, width);
      if (event.pointerType === "mouse") box.scrollTop -= event.clientY - before.clientY;
    } else if (pointers.size === 2) {
      moved = 2 * NEAR;
      const [other] = [...pointers.values()].filter((each) => each.pointerId !== event.pointerId);
      const apart = (each) => Math.max(20, Math.abs(each.clientX - other.clientX));
      const middle = (event.clientX + other.clientX) / 2 - canvas.getBoundingClientRect().left;
      zoom(apart(before) / apart(event), middle / wide);
    }
    pointers.set(event.pointerId, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (pointers.delete(event.pointerId) && pointers.size === 0 && moved <= NEAR && found !== null) {
      const place = canvas.getBoundingClientRect();
      choose(under(event.clientX - place.left, event.clientY - place.top + box.scrollTop), false);
    }
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / canvas.clientWidth);
    else if (event.deltaX !== 0) pan(event.deltaX / canvas.clientWidth);
    else return; // the box scrolls
    event.preventDefault();
  }, { passive: false });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5, 0.5), "-": () => zoom(2, 0.5), Home: all }[event.key];
    if (move === undefined || event.ctrlKey || event.metaKey || event.altKey || found === null) return;
    event.preventDefault();
    move();
  });

  function under(x, y) {
    const scale = canvas.clientWidth / width;
    let best = -1;
    let least = NEAR + 1;
    found.slices.forEach((each, number) => {
      const top = lanes[each[LANE_AT]];
      if (y < top || y >= top + LANE) return;
      const left = (each[BEGUN] - from) * scale;
      const right = (each[ENDED] - from) * scale;
      const off = x < left ? left - x : x > right ? x - right : 0;
      if (off < least) {
        best = number;
        least = off;
      }
    });
    return best;
  }

  // -- drawing ---------------------------------------------------------------------------------------------------

  function redraw() {
    if (frame === 0) frame = requestAnimationFrame(draw);
  }

  function draw() {
    frame = 0;
    const wide = box.clientWidth;
    const high = Math.min(box.clientHeight, inner.clientHeight);
    if (found === null || wide === 0 || high === 0) return;
    const sharp = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(wide * sharp) || canvas.height !== Math.round(high * sharp)) {
      canvas.width = Math.round(wide * sharp);
      canvas.height = Math.round(high * sharp);
      canvas.style.height = `${high}px`;
    }
    const style = getComputedStyle(element);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const pen = canvas.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.fillStyle = colour("back");
    pen.fillRect(0, 0, wide, high);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const down = box.scrollTop;
    const scale = wide / width;
    const at = (moment) => (moment - from) * scale;
    for (const [y, , whole] of titles) {
      if (!whole || y - down > high || y - down < -PROCESS) continue;
      pen.fillStyle = colour("raised");
      pen.fillRect(0, y - down + 2, wide, PROCESS - 4);
    }
    const shown = [];
    const last = new Float64Array(lanes.length).fill(-1);
    for (let number = 0; number < found.slices.length; number += 1) {
      const each = found.slices[number];
      const left = at(each[BEGUN]);
      const right = at(each[ENDED]);
      if (right < 0 || left - each[WAITED] * scale > wide) continue;
      if (each[KIND] === CALLED && each[OTHER] >= 0) shown.push(number);
      const y = lanes[each[LANE_AT]] - down;
      if (y < -LANE || y > high) continue;
      if (each[WAITED] * scale > 1) {
        pen.fillStyle = colour("faint");
        pen.fillRect(at(each[BEGUN] - each[WAITED]), y + 7, each[WAITED] * scale, 2);
      }
      if (right - left < 1 && left < last[each[LANE_AT]] + 1) continue; // that pixel is drawn
      last[each[LANE_AT]] = left;
      pen.fillStyle = each[FAILED] ? colour("bad") : shade(each);
      const begin = Math.max(left, -2);
      const size = Math.max(1, Math.min(right, wide + 2) - begin);
      pen.fillRect(begin, y + 1, size, LANE - 3);
      if (size > 30) {
        pen.fillStyle = each[FAILED] ? colour("back") : colour("text");
        write(pen, textOf(each), begin + 3, y + LANE / 2 - 0.5, size - 5);
      }
    }
    for (const number of shown.length <= ARROWS ? shown : shown.filter((each) => each === chosen || found.slices[each][OTHER] === chosen)) {
      pen.globalAlpha = number === chosen || found.slices[number][OTHER] === chosen ? 1 : Math.min(1, Math.max(0.15, 25 / shown.length));
      arrows(pen, number, at, down, colour("link"));
    }
    pen.globalAlpha = 1;
    if (chosen >= 0) {
      const each = found.slices[chosen];
      pen.strokeStyle = colour("text");
      pen.lineWidth = 2;
      pen.strokeRect(at(each[BEGUN]) - 1, lanes[each[LANE_AT]] - down, Math.max(2, length(chosen) * scale) + 2, LANE - 1);
    }
    pen.textAlign = "left";
    for (const [y, text, whole] of titles) {
      if (y - down > high || y - down < -PROCESS) continue;
      pen.fillStyle = colour(whole ? "text" : "faint");
      pen.font = `${whole ? "600 12px" : "11px"} system-ui, sans-serif`;
      write(pen, text, whole ? 6 : 10, y - down + (whole ? PROCESS : TITLE + 2) / 2, wide - 12);
    }
    axis(pen, wide, at, colour);
  }

  function shade(each) {
    const text = found.texts[each[TEXT]];
    let hue = 7;
    for (let place = 0; place < text.length; place += 1) hue = (31 * hue + text.charCodeAt(place)) % 360;
    const light = dark ? (each[KIND] === CALLED ? 24 : 32) : each[KIND] === CALLED ? 88 : 78;
    return `hsl(${hue} 50% ${light}%)`;
  }

  function write(pen, text, x, y, room) {
    const fits = Math.floor(room / 5.2);
    if (fits >= 3) pen.fillText(text.length > fits + 2 ? `${text.slice(0, fits)}…` : text, x, y, room);
  }

  function arrows(pen, number, at, down, colour) {
    const call = found.slices[number];
    const run = found.slices[call[OTHER]];
    const middle = (each) => lanes[each[LANE_AT]] - down + LANE / 2 - 1;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = number === chosen || call[OTHER] === chosen ? 2 : 1;
    line(pen, at(call[BEGUN]), middle(call), at(run[BEGUN]), middle(run), []);
    if (!call[UNFINISHED] && !run[UNFINISHED]) line(pen, at(run[ENDED]), middle(run), at(call[ENDED]), middle(call), [3, 3]);
    pen.setLineDash([]);
  }

  function line(pen, x, y, to, down, dashes) {
    const bend = Math.max(8, Math.abs(to - x) / 2);
    pen.setLineDash(dashes);
    pen.beginPath();
    pen.moveTo(x, y);
    pen.bezierCurveTo(x + bend, y, to - bend, down, to - 3, down);
    pen.stroke();
    pen.setLineDash([]);
    pen.beginPath();
    pen.moveTo(to, down);
    pen.lineTo(to - 5, down - 3);
    pen.lineTo(to - 5, down + 3);
    pen.fill();
  }

  function axis(pen, wide, at, colour) {
    pen.fillStyle = colour("raised");
    pen.fillRect(0, 0, wide, AXIS);
    pen.fillStyle = colour("faint");
    pen.font = "11px system-ui, sans-serif";
    const rough = (width * 90) / wide;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
    for (let moment = Math.ceil(from / step) * step; moment < from + width; moment += step) {
      pen.fillRect(at(moment), 0, 1, AXIS);
      pen.fillText(moment < 0 ? "" : short(moment, step), at(moment) + 3, AXIS / 2);
    }
  }

  function short(moment, step) {
    const [unit, text] = step >= 1e5 ? [1e6, "s"] : step >= 100 ? [1e3, "ms"] : [1, "µs"];
    const digits = Math.max(0, -Math.floor(Math.log10(step / unit)));
    return `${(moment / unit).toFixed(digits)} ${text}`;
  }

  box.addEventListener("scroll", redraw);
  new ResizeObserver(redraw).observe(box);
  element.append(make("form", { onsubmit: (event) => event.preventDefault() }, button,
    make("label", { for: "timeline-seconds", class: "live" }, "of the last", choice), file), said,
    make("div", { class: "moves" }, ...moves), box, told, slowest);
  take();
  return {
    update() {
      if (dark !== null && dark !== matchMedia("(prefers-color-scheme: dark)").matches) redraw();
    },
  };
}
