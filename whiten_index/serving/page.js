"use strict";
// Whatever the server sends is written as text, never as HTML.

const TOP = 10;
const LONGEST = { main: 160, other: 80 };
const $ = (id) => document.getElementById(id);
const state = { token: sessionStorage.getItem("token"), width: null, running: null, hovered: null };

// ---- Small helpers

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const make = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const pairs = (facts) =>
  facts.filter(([, value]) => value != null)
    .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
const count = (number) => number.toLocaleString("en");
const percent = (share) => (share == null ? null : `${Math.round(100 * share)} %`);
const short = (number) => String(Number(number.toPrecision(3)));
const time = (milliseconds) => `${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)}\u00a0ms`;

function bytes(number) {
  const power = Math.min(Math.floor(Math.log10(Math.max(number, 1)) / 3), 4);
  return `${short(number / 1000 ** power)}\u00a0${["B", "kB", "MB", "GB", "TB"][power]}`;
}

function say(text, isError = false) {
  $("status").textContent = isError ? `Error: ${text}` : text;
  $("status").classList.toggle("error", isError);
}

/** Integers of 64 bits, such as ids, stay as they were written. */
function exact(_, value, context) {
  const large = typeof value === "number" && Math.abs(value) > Number.MAX_SAFE_INTEGER;
  return large && context && /^-?\d+$/.test(context.source) ? context.source : value;
}

async function api(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (state.token) headers.authorization = `Bearer ${state.token}`;
  const response = await fetch(`v1/${path}`, { headers, ...options }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  const text = await response.text();
  if (response.ok) return JSON.parse(text, exact);
  if (response.status === 401) {
    const message = state.token ? "the token is wrong" : "this server asks for a token";
    sessionStorage.removeItem("token");
    state.token = null;
    $("token-form").hidden = false;
    $("token").focus();
    throw new Error(message);
  }
  let detail = `${response.status} ${response.statusText}`;
  try { detail = JSON.parse(text).detail ?? detail; } catch { /* it came from a proxy */ }
  throw new Error(detail);
}

function guarded(task) {
  return task().catch((error) => { if (error.name !== "AbortError") say(error.message, true); });
}

// ---- Search

async function search() {
  state.running?.abort();
  const text = $("query").value.trim();
  if (!text) {
    say("");
    return show({ columns: [], widths: [] });
  }
  state.running = new AbortController();
  say("Searching …");
  const started = performance.now();
  const answer = await api("compare", {
    method: "POST",
    body: JSON.stringify({ index: $("index").value, text, top_k: TOP }),
    signal: state.running.signal,
  });
  show(answer);
  const found = answer.columns.find((each) => each.kind === "index").hits.length;
  const note = answer.note ? ` Raw embeddings are not compared: ${answer.note}.` : "";
  say(`${found} ${found === 1 ? "hit" : "hits"} in ${time(performance.now() - started)}.${note}`);
}

function show({ columns, widths }) {
  const raw = columns.find((each) => each.kind === "raw");
  const sections = columns.map((each) => column(each, each.name, raw));
  const index = columns.find((each) => each.kind === "index");
  if (widths.length) sections.push(slidingColumn(widths, index.k, raw));
  $("columns").replaceChildren(...sections, draw("svg", { "aria-hidden": "true" }));
  $("scroller").hidden = !sections.length;
  $("legend").hidden = !raw;
  drawLines();
}

function column(each, title, raw, ...controls) {
  const head = make("div", { class: "head" }, make("h2", {}, title), ...controls, make("dl"));
  const section = make("section", { class: each.kind, "aria-label": title }, head, make("ol"));
  fillColumn(section, each, raw);
  return section;
}

/** One width of the fit; the slider shows another without asking the server. */
function slidingColumn(widths, k, raw) {
  const below = widths.findLastIndex((each) => each.k < k);
  const known = widths.findIndex((each) => each.k === state.width);
  const start = known >= 0 ? known : Math.max(below, 0);
  const slider = make("input", {
    type: "range", min: 0, max: widths.length - 1, value: start,
    "aria-valuetext": `k = ${widths[start].k}`,
  });
  const label = make("label", { class: "slide" }, "Width ", slider);
  const section = column(widths[start], "This fit at another width", raw, label);
  slider.addEventListener("input", () => {
    state.width = widths[slider.value].k;
    slider.setAttribute("aria-valuetext", `k = ${state.width}`);
    fillColumn(section, widths[slider.value], raw);
    history.replaceState(null, "", hash());
    drawLines();
  });
  return section;
}

function fillColumn(section, each, raw) {
  const ranks = new Map(raw && each !== raw ? raw.hits.map((hit, i) => [hit.id, i + 1]) : []);
  const found = new Set(each.hits.map((hit) => hit.id));
  const note = each === raw ? ", all widths" : "";
  section.querySelector("dl").replaceChildren(...pairs([
    [each.kind === "raw" ? "dims" : "k", each.k],
    [`overlap@${raw?.hits.length}`, each === raw ? "reference" : percent(each.overlap)],
    ["search", each.milliseconds == null ? null : time(each.milliseconds) + note],
    ["size", `${bytes(each.bytes_a_row)} a row, ${bytes(each.bytes)}`],
  ]));
  section.querySelector("ol").replaceChildren(
    ...each.hits.map((hit, i) =>
      row(hit, i + 1, ranks.size ? moved(i + 1, ranks.get(hit.id)) : make("span"))),
    ...(ranks.size ? raw.hits : []).filter((hit) => !found.has(hit.id)).map((hit) =>
      row(hit, "–", mark("gone", `was ${ranks.get(hit.id)}`,
        `not found here; rank ${ranks.get(hit.id)} by raw embeddings`), "hit gone")),
  );
}

const mark = (kind, shown, spoken) => make("span", { class: `mark ${kind}` },
  make("span", { "aria-hidden": "true" }, shown), make("span", { class: "sr" }, spoken));

function moved(rank, before) {
  if (before == null) return mark("new", "new", "new: not found by raw embeddings");
  if (before === rank) return mark("same", "=", "same rank as by raw embeddings");
  const by = Math.abs(rank - before);
  const [kind, arrow] = rank < before ? ["up", "↑"] : ["down", "↓"];
  return mark(kind, `${arrow} ${by}`, `${by} ${kind} from rank ${before} by raw embeddings`);
}

function row(hit, rank, mark, kind = "hit") {
  const texts = Object.entries(hit.columns).filter(([, value]) => value != null && value !== "")
    .map(([name, value]) =>
      [name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
  const first = texts.findIndex(([name]) => typeof hit.columns[name] === "string");
  const [main] = first < 0 ? [] : texts.splice(first, 1);
  const element = make("li", { class: kind },
    make("span", { class: "quiet" }, rank),
    make("span", { class: "text" }, ...cut(main ? main[1] : String(hit.id), LONGEST.main)), mark,
    ...texts.map(([name, value]) => make("small", {}, `${name}: `, ...cut(value, LONGEST.other))),
    make("small", {}, `${kind === "hit" ? `score ${hit.score.toFixed(3)} · ` : ""}id ${hit.id}`));
  element.hit = hit.id;
  return element;
}

function cut(text, most) {
  const span = make("span", { dir: "auto" }, text);
  if (text.length <= most + 20) return [span];
  const start = `${Array.from(text.slice(0, 2 * most)).slice(0, most).join("")}…`;
  const button = make("button", { type: "button", "aria-expanded": "false" }, "more");
  span.textContent = start;
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "false";
    button.setAttribute("aria-expanded", open);
    button.textContent = open ? "less" : "more";
    span.textContent = open ? text : start;
    drawLines();
  });
  return [span, button];
}

// ---- Lines from a document to the same one in the next column

function drawLines() {
  const svg = $("columns").querySelector("svg");
  if (!svg) return;
  const origin = svg.getBoundingClientRect();
  const columns = [...$("columns").querySelectorAll("section")].map((section) =>
    new Map([...section.querySelectorAll("li")].map((li, rank) => [li.hit, { li, rank }])));
  svg.replaceChildren(...columns.slice(1).flatMap((right, i) =>
    [...columns[i]].filter(([id]) => right.has(id)).map(([id, from]) => {
      const to = right.get(id), gone = [from, to].map(({ li }) => li.classList.contains("gone"));
      if (gone[0] && gone[1]) return "";
      const [a, b] = [from.li.getBoundingClientRect(), to.li.getBoundingClientRect()];
      const [x, X] = [a.right - origin.left, b.left - origin.left];
      const [y, Y] = [a.top - origin.top + 20, b.top - origin.top + 20], middle = (x + X) / 2;
      const way = to.rank < from.rank ? "up" : to.rank > from.rank ? "down" : "same";
      const line = draw("path", {
        class: gone[0] || gone[1] ? "gone" : way,
        d: `M${x} ${y}C${middle} ${y} ${middle} ${Y} ${X} ${Y}`,
      });
      line.hit = id;
      return line;
    })));
  light(state.hovered);
}

function light(id) {
  state.hovered = id;
  for (const each of $("columns").querySelectorAll("li, path")) {
    each.classList.toggle("lit", id != null && each.hit === id);
  }
}

// ---- About the index

async function about() {
  const name = $("index").value, path = `indexes/${encodeURIComponent(name)}`;
  const [facts, { versions }] = await Promise.all([api(path), api(`${path}/versions`)]);
  if (name !== $("index").value) return;
  const { whitening, spectrum, certificate } = facts;
  const heading = (text) => make("h2", {}, text);
  $("panel-about").replaceChildren(
    make("dl", { class: "facts" }, ...pairs([
      ["version", facts.version],
      ["rows", count(facts.rows)],
      ["encoder", facts.encoder?.model],
      ["transform", whitening && `${whitening.kind}, k = ${whitening.k} of ${whitening.dim}`],
      ["exponent", whitening?.exponent],
      ["variance kept", percent(whitening?.variance_kept)],
      ["why", facts.choice?.why],
      ["agreement@10 with raw", percent(facts.quality?.agreement_at_10)],
      ["index", bytes(facts.bytes.index.total)],
      ["raw embeddings", bytes(4 * facts.rows * whitening.dim)],
    ])),
    ...(spectrum?.length ? [
      heading("Spectrum"),
      make("div", { class: "charts" },
        chart("Variance kept by the first k directions",
          spectrum.map((each) => [each.k, each.variance_kept]), whitening.k, percent),
        chart("Eigenvalue of direction k, logarithmic",
          spectrum.map((each) => [each.k, each.eigenvalue]), whitening.k, short, Math.log10)),
      make("details", {}, make("summary", {}, "The same as a table"),
        table("Spectrum", ["k", "eigenvalue", "variance kept"],
          spectrum.map((each) => [each.k, short(each.eigenvalue), percent(each.variance_kept)]))),
    ] : []),
    ...(certificate ? [
      heading("Certificate"),
      make("p", {}, `${certificate.measure} is ${certificate.index.toFixed(2)}, and `,
        `${certificate.raw.toFixed(2)} by exact search of the raw embeddings; no part measured `,
        `loses more than ${certificate.at_most.toFixed(2)} points.`),
      table("Points lost", ["questions with", "number", "points lost", "95 % interval"],
        [certificate, ...certificate.strata].map((each) => [
          each.by == null ? "all" : `${each.by} ${each.value}`, count(each.questions),
          each.loss.toFixed(2), each.interval.map((end) => end.toFixed(2)).join(" to "),
        ])),
    ] : []),
    heading("Versions"),
    table("Newest first; drift in nats a dimension",
      ["version", "made", "rows", "size", "decision", "drift", "state"],
      versions.map((each) => [
        each.name, each.created ? `${each.created.slice(0, 16).replace("T", " ")} UTC` : "–",
        each.rows == null ? "–" : count(each.rows),
        each.bytes == null ? "–" : bytes(each.bytes), each.decision ?? "build",
        each.drift == null ? "–" : short(each.drift),
        ["published", "withdrawn", "candidate"].filter((name) => each[name])
          .concat(each.sound ? "damaged" : each.unread ? "not readable" : []).join(", ") || "–",
      ])),
  );
}

const table = (caption, heads, rows) =>
  make("div", { class: "table", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {}, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...rows.map(([first, ...others]) => make("tr", {},
        make("th", { scope: "row" }, first), ...others.map((cell) => make("td", {}, cell)))))));

/** A line over log k; the dashed line is the index's own width. */
function chart(title, points, own, text, scale = (value) => value) {
  points = points.filter(([, value]) => Number.isFinite(scale(value)));
  const [wide, high, left, top] = [420, 220, 52, 14];
  const values = points.map(([, value]) => scale(value));
  const [low, up] = scale === Math.log10 ? [Math.min(...values), Math.max(...values)] : [0, 1];
  const most = Math.log(points.at(-1)?.[0] || 2) || 1;
  const x = (k) => left + (wide - left - 10) * (Math.log(k) / most);
  const y = (value) => top + (high - top - 30) * ((up - scale(value)) / (up - low || 1));
  const ends = scale === Math.log10 ? [10 ** up, 10 ** low] : [1, 0.5, 0];
  const about = `${title}: ${points.map(([k, value]) => `${text(value)} at ${k}`).join(", ")}`;
  return make("figure", {}, make("figcaption", {}, title),
    draw("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": about },
      ...ends.flatMap((value) => [
        draw("line", { x1: left, x2: wide - 10, y1: y(value), y2: y(value) }),
        draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, text(value)),
      ]),
      draw("line", { class: "own", x1: x(own), x2: x(own), y1: top, y2: high - 30 }),
      draw("text", { x: x(own), y: top - 4, "text-anchor": "middle" }, `k = ${own}`),
      draw("polyline", { points: points.map(([k, value]) => `${x(k)},${y(value)}`).join(" ") }),
      ...points.map(([k, value]) => draw("circle", { cx: x(k), cy: y(value), r: 3.5 })),
      ...points.filter(([k], i) => i + 1 === points.length || x(points[i + 1][0]) - x(k) > 28)
        .map(([k]) => draw("text", { x: x(k), y: high - 12, "text-anchor": "middle" }, k))));
}

// ---- The page: tabs, what is in its address, token

const tabs = [...document.querySelectorAll("[role=tab]")];

function open(tab) {
  for (const each of tabs) {
    each.setAttribute("aria-selected", each === tab);
    each.tabIndex = each === tab ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
  if (tab.id === "tab-about") guarded(about); else drawLines();
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: -1 }[event.key];
    if (to == null) return;
    event.preventDefault();
    const next = tabs.at(to % tabs.length);
    open(next);
    next.focus();
  });
}

function hash(query = $("query").value.trim()) {
  const given = { q: query, index: $("index").value };
  return `#${new URLSearchParams(state.width ? { ...given, k: state.width } : given)}`;
}

function fromHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  $("query").value = given.get("q") ?? "";
  state.width = Number(given.get("k")) || state.width;
  const known = [...$("index").options].some((each) => each.value === given.get("index"));
  if (known) $("index").value = given.get("index");
  return search();
}

function go() {
  if (!$("query").value.trim()) return;
  if (location.hash === hash()) guarded(search); else location.hash = hash();
}

/** Links to the queries that the models of a migration answer most differently. */
async function suggest() {
  const name = $("index").value, { models } = await api(`indexes/${encodeURIComponent(name)}`);
  if (name !== $("index").value) return;
  $("changed").hidden = !models?.changed_most.length;
  $("changed").replaceChildren("Changed most by the new model: ",
    ...(models?.changed_most ?? []).map(({ query, old, new: now }) => make("a", {
      href: hash(query), title: `${models.measure} ${old.toFixed(0)} → ${now.toFixed(0)}`,
    }, query)));
}

async function start() {
  const { indexes } = await api("indexes");
  $("token-form").hidden = true;
  say("");
  $("index").replaceChildren(...indexes.filter((each) => each.texts)
    .map((each) => make("option", { value: each.name }, each.name)));
  $("index-label").hidden = $("index").options.length < 2;
  if (!$("index").options.length) say("no index here knows the encoder of its queries", true);
  else guarded(suggest);
  if (location.hash && $("index").options.length) await fromHash();
  if (!$("panel-about").hidden) await about();
}

$("search").addEventListener("submit", (event) => { event.preventDefault(); go(); });
$("index").addEventListener("change", () => {
  go();
  guarded(suggest);
  if (!$("panel-about").hidden) guarded(about);
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = $("token").value;
  sessionStorage.setItem("token", state.token);
  $("token").value = "";
  guarded(start);
});
$("columns").addEventListener("pointerover", (event) => light(event.target.closest("li")?.hit));
$("columns").addEventListener("pointerleave", () => light(null));
$("columns").addEventListener("focusin", (event) => light(event.target.closest("li")?.hit));
addEventListener("hashchange", () => guarded(fromHash));
new ResizeObserver(drawLines).observe($("columns"));
guarded(start);
