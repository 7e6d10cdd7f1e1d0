// Small helpers: elements, and amounts as people read them. Texts are set as texts only: what comes from a job is never markup.

export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((each) => each !== null && each !== undefined));
  return element;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 0.00095) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.00995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function amount(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (bytes >= 1024 && place < units.length - 1) {
    bytes /= 1024;
    place += 1;
  }
  return `${place === 0 || bytes >= 100 ? bytes.toFixed(0) : bytes.toFixed(1)} ${units[place]}`;
}

export function figure(value) {
  if (value === null || value === undefined) return "-";
  return value >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function count(number, what, many = `${what}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? what : many}`;
}

// columns: {head, cell(row), number, sort}; returns the table and its body.
export function table(caption, columns, sorting = null) {
  const head = make("tr", {}, ...columns.map((column) => {
    const own = { scope: "col", class: column.number ? "number" : null };
    if (sorting === null || !column.sort) return make("th", own, column.head);
    if (sorting.by === column.sort) own["aria-sort"] = column.sort === "title" ? "ascending" : "descending";
    return make("th", own, make("button", { type: "button", onclick: () => sorting.choose(column.sort) }, column.head));
  }));
  const body = make("tbody");
  const whole = make("table", { "aria-label": caption }, make("thead", {}, head), body);
  return { whole, body };
}

export function row(columns, value, given = {}) {
  return make("tr", given, ...columns.map((column) => {
    const cell = column.cell(value);
    const text = typeof cell === "string" ? cell : "";
    return make("td", { class: column.number ? "number" : null, title: text.length > 40 ? text : null }, cell);
  }));
}

// A region that scrolls: it can be reached by the keyboard.
export function scrolling(label, tall, ...children) {
  return make("div", { class: tall ? "wide tall" : "wide", role: "region", "aria-label": label, tabindex: "0" }, ...children);
}
