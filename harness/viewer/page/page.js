"use strict";
// Every text comes from JSON and goes into the page by `textContent`: nothing that was recorded is markup here.
const ROW_HEIGHT = 22;
const ROW_CHARACTERS = 110;
const TOKEN_CHARACTERS = 60;
const WORDS_CHARACTERS = 20000;
const LANES = 200;
const COLORS = ["mask", "version", "logprob"];

const byId = (id) => document.getElementById(id);
const read = (id) => JSON.parse(byId(id).textContent);
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029]/gu;

// Control characters and marks of direction, written out; a newline and a tab stay where there are lines.
function printable(text, lines) {
  return String(text).replace(UNSEEN, (char) => {
    if (lines && (char === "\n" || char === "\t")) return char;
    if (char === "\n") return "\\n";
    if (char === "\t") return "\\t";
    return "\\u{" + char.codePointAt(0).toString(16) + "}";
  });
}

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = printable(text, tag === "pre");
  return made;
}

// A column of 4-byte little-endian numbers.
function column(encoded, Numbers) {
  const bytes = Uint8Array.from(atob(encoded), (char) => char.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const numbers = new Numbers(bytes.length / 4);
  for (let i = 0; i < numbers.length; i++) {
    numbers[i] = Numbers === Float32Array ? view.getFloat32(4 * i, true) : view.getUint32(4 * i, true);
  }
  return numbers;
}

const run = read("run");
const table = read("texts");
let shown = [];
let chosen = 0;
let session = null;
let turnChosen = 0;
let rows = [];
let color = 0;
const drawn = new Map();

const counts = (fates) => Object.entries(fates).map(([name, count]) => count + " " + name).join(", ");

function overview() {
  const facts = byId("facts");
  facts.append(make("div", "", [run.suite, run.status].filter(Boolean).join(": ") || "a store"));
  for (const start of run.starts) facts.append(make("div", "dim", start.command.join(" ")));
  if (run.ledger) facts.append(make("div", "dim", "ledger: " + JSON.stringify(run.ledger)));
  for (const sentence of run.missing) facts.append(make("div", "missing", "missing: " + sentence));
  const outcomes = [...new Set(run.sessions.map((each) => each.outcome || "no outcome"))];
  for (const outcome of ["", ...outcomes]) {
    const option = make("option", "", outcome || "every outcome");
    option.value = outcome;
    byId("outcome").append(option);
  }
}

function list() {
  const words = byId("filter").value.toLowerCase();
  const outcome = byId("outcome").value;
  shown = run.sessions.filter((each) =>
    (!outcome || (each.outcome || "no outcome") === outcome) &&
    (!words || [each.number, each.id, each.scenario, each.outcome, each.cause, each.why].join(" ").toLowerCase().includes(words)));
  chosen = Math.max(0, Math.min(chosen, shown.length - 1));
  const lines = shown.map((each, place) => {
    const line = make("tr", place === chosen ? "chosen" : "");
    const id = each.id === null ? "none" : each.id.slice(0, 8);
    for (const value of [each.number, id, each.scenario, each.outcome, each.turns, each.sampled, each.reward, each.why]) {
      line.append(make("td", "", value === null ? "" : value));
    }
    line.addEventListener("click", () => { chosen = place; list(); open(); });
    return line;
  });
  byId("sessions").replaceChildren(...lines);
  timeline();
}

// A lane per session; a bar from the admission of a turn to its end, and what lies between is the agent's own time.
function timeline() {
  const lanes = shown.slice(0, LANES);
  const times = lanes.flatMap((each) => each.times);
  let begin = Infinity;
  let end = -Infinity;
  for (const [at, seconds] of times) { begin = Math.min(begin, at); end = Math.max(end, at + seconds); }
  const all = Math.max(end - begin, 1e-9);
  byId("span").textContent = times.length
    ? all.toFixed(2) + " s" + (shown.length > LANES ? "; the first " + LANES + " of " + shown.length + " sessions" : "") : "no turns";
  byId("lanes").replaceChildren(...lanes.map((each, place) => {
    const lane = make("div", place === chosen ? "lane chosen" : "lane");
    each.times.forEach(([at, seconds, status, index]) => {
      const bar = make("div", "turn");
      if (["truncated", "aborted", "failed"].includes(status)) bar.classList.add(status);
      bar.style.left = (100 * (at - begin) / all) + "%";
      bar.style.width = (100 * seconds / all) + "%";
      bar.title = printable((each.id || "").slice(0, 8) + " turn " + index + " " + status + ": second " +
        (at - begin).toFixed(2) + " to " + (at - begin + seconds).toFixed(2));
      lane.append(bar);
    });
    lane.addEventListener("click", () => { chosen = place; list(); open(); });
    return lane;
  }));
}

function open() {
  const line = shown[chosen];
  byId("session").hidden = !line;
  if (!line) return;
  session = line.element === null ? { turns: [], ledger: {}, phase: "not here", refusals: {} } : read(line.element);
  turnChosen = 0;
  byId("name").textContent = printable((line.id || "no session") + ", " + session.phase);
  const why = [line.outcome, line.cause && "by the " + line.cause, line.why, line.log].filter(Boolean).join("; ");
  byId("why").replaceChildren(
    make("div", "", why), make("div", "dim", "ledger: " + JSON.stringify(session.ledger)),
    make("div", "dim", "refused: " + (counts(session.refusals) || "nothing")));
  layOut();
  showTurn();
}

function showTurn() {
  byId("turns").replaceChildren(...session.turns.map((turn, place) => {
    const line = make("tr", place === turnChosen ? "chosen" : "");
    const versions = turn.versions.map((span) => span.version).join(", ");
    const values = ["  ".repeat(turn.depth) + (turn.depth ? "+ " : "") + turn.index, turn.status, turn.end, versions,
      turn.prompt, turn.sampled, turn.seconds.toFixed(2),
      counts(turn.fates) + (turn.unknown ? ", at most " + turn.unknown + " unknown" : "")];
    for (const value of values) line.append(make("td", "", value));
    line.addEventListener("click", () => { turnChosen = place; showTurn(); scrollToTurn(); });
    return line;
  }));
  const turn = session.turns[turnChosen];
  const parts = [];
  for (const [role, words] of turn ? turn.words : []) {
    parts.push(make("div", role === "error" ? "error" : "dim", role));
    const block = make("pre", "words", words.slice(0, WORDS_CHARACTERS));
    parts.push(block);
    if (words.length > WORDS_CHARACTERS) {
      const more = make("button", "", "all " + words.length + " characters");
      more.addEventListener("click", () => { block.textContent = printable(words, true); });
      parts.push(more);
    }
  }
  byId("transcript").replaceChildren(...parts);
  draw();
}

function clear() {
  drawn.clear();
  byId("space").replaceChildren();
}

function nextColor() {
  color = (color + 1) % COLORS.length;
  clear();
  draw();
}

// Rows of tokens, by their lengths: only those in sight become elements.
function layOut() {
  rows = [];
  clear();
  session.versions = [...new Set(session.turns.flatMap((turn) => turn.versions.map((span) => String(span.version))))];
  session.turns.forEach((turn, place) => {
    turn.tokens = turn.tokens instanceof Uint32Array ? turn.tokens : column(turn.tokens, Uint32Array);
    turn.logprobs = turn.logprobs instanceof Float32Array ? turn.logprobs : column(turn.logprobs, Float32Array);
    rows.push({ place, from: -1, to: -1 });
    let from = 0;
    let used = 0;
    for (let i = 0; i < turn.tokens.length; i++) {
      const [id, text] = table[turn.tokens[i]];
      used += Math.min(TOKEN_CHARACTERS, text === null ? String(id).length + 1 : text.length) || 1;
      const ends = text !== null && text.endsWith("\n");
      if (used >= ROW_CHARACTERS || ends || i + 1 === turn.tokens.length || i + 1 === turn.context) {
        rows.push({ place, from, to: i + 1 });
        from = i + 1;
        used = 0;
      }
    }
  });
  byId("space").style.height = (rows.length * ROW_HEIGHT) + "px";
  byId("strip").scrollTop = 0;
}

function scrollToTurn() {
  byId("strip").scrollTop = ROW_HEIGHT * Math.max(0, rows.findIndex((row) => row.place === turnChosen));
  draw();
}

function token(turn, i) {
  const [id, text] = table[turn.tokens[i]];
  const position = i - turn.context;
  const value = { id, text, position, logprob: null, version: null, fate: "context" };
  if (position < 0) return value;
  const logprob = turn.logprobs[position];
  if (logprob === logprob) value.logprob = logprob;
  const span = turn.versions.find((each) => position >= each.start && position < each.end);
  if (span) value.version = String(span.version);
  value.fate = turn.fate === "trained" || turn.fate === "masked" ? (position < turn.masked_from ? "trained" : "masked") : turn.fate;
  return value;
}

function paint(element, value) {
  if (value.fate === "context") { element.classList.add("context"); return; }
  if (COLORS[color] === "mask") {
    element.classList.add(["trained", "masked"].includes(value.fate) ? value.fate : "dropped");
  } else if (COLORS[color] === "version") {
    element.style.backgroundColor = "hsl(" + (137 * session.versions.indexOf(value.version)) % 360 + " 60% 50% / .4)";
  } else if (value.logprob !== null) {
    element.style.backgroundColor = "hsl(" + Math.round(120 * Math.exp(value.logprob)) + " 70% 50% / .4)";
  }
}

function makeRow(at) {
  const { place, from, to } = rows[at];
  const turn = session.turns[place];
  const row = make("div", from < 0 ? "row head" : "row");
  row.style.top = (at * ROW_HEIGHT) + "px";
  if (from < 0) row.textContent = "turn " + turn.index;
  for (let i = Math.max(0, from); i < to; i++) {
    const value = token(turn, i);
    const text = value.text === null ? "#" + value.id : value.text;
    const span = make("span", "token", text.length > TOKEN_CHARACTERS ? text.slice(0, TOKEN_CHARACTERS) + "\u2026" : text);
    paint(span, value);
    span.addEventListener("mouseenter", () => { byId("value").textContent = say(turn, value); });
    row.append(span);
  }
  return row;
}

// Rows that stay in sight stay elements.
function draw() {
  if (!session) return;
  const strip = byId("strip");
  const first = Math.max(0, Math.floor(strip.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(rows.length, first + Math.ceil((strip.clientHeight || 600) / ROW_HEIGHT) + 8);
  for (const [at, row] of drawn) {
    if (at < first || at >= last) { row.remove(); drawn.delete(at); }
  }
  for (let at = first; at < last; at++) {
    if (drawn.has(at)) continue;
    drawn.set(at, makeRow(at));
    byId("space").append(drawn.get(at));
  }
  byId("color").textContent = "color: " + COLORS[color];
}

function say(turn, value) {
  const text = value.text === null ? "no text" : JSON.stringify(value.text.slice(0, 1000));
  return printable("turn " + turn.index + (value.position < 0 ? " context" : " token " + value.position) + "  id " + value.id +
    "  " + value.fate + "  logprob " + (value.logprob === null ? "-" : value.logprob) +
    "  version " + (value.version === null ? "-" : value.version) + "  " + text);
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target && ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else { byId("session").hidden = true; session = null; }
    return;
  }
  if (typing) return;
  const step = { j: 1, k: -1, J: 1, K: -1 }[event.key];
  if (event.key === "/") { byId("filter").focus(); event.preventDefault(); }
  else if (event.key === "Enter") open();
  else if (event.key === "c" && session) nextColor();
  else if (step && (event.key === "J" || event.key === "K" || !session)) {
    chosen = Math.max(0, Math.min(shown.length - 1, chosen + step));
    list();
    if (session) open();
  } else if (step && session.turns.length) {
    turnChosen = Math.max(0, Math.min(session.turns.length - 1, turnChosen + step));
    showTurn();
    scrollToTurn();
  }
}

byId("filter").addEventListener("input", list);
byId("outcome").addEventListener("change", list);
byId("strip").addEventListener("scroll", draw);
byId("color").addEventListener("click", nextColor);
document.addEventListener("keydown", press);
overview();
list();
