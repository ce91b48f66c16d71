"use strict";
// Recorded data, read from the page. Recorded text enters it by `textContent` only, so none of it is markup.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029]/u;
const EVERY_UNSEEN = new RegExp(UNSEEN, "gu");
const CELL_CHARACTERS = 300;

const byId = (id) => document.getElementById(id);
const read = (id) => JSON.parse(byId(id).textContent);
const run = read("run");
const table = read("texts");

// Control, format and direction characters, written out; newlines and tabs stay in blocks of lines.
function printable(text, lines) {
  text = String(text);
  if (!UNSEEN.test(text)) return text;
  return text.replace(EVERY_UNSEEN, (char) => {
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

function makeButton(words, act, label) {
  const button = make("button", "", words);
  button.type = "button";
  if (label) button.setAttribute("aria-label", printable(label));
  button.addEventListener("click", act);
  return button;
}

function makeRow(values, isChosen, choose) {
  const row = make("div", isChosen ? "row chosen" : "row");
  row.setAttribute("role", "row");
  row.setAttribute("aria-selected", String(isChosen));
  for (const value of values) {
    const cell = make("span", "", value === null ? "" : String(value).slice(0, CELL_CHARACTERS));
    cell.setAttribute("role", "cell");
    row.append(cell);
  }
  row.addEventListener("click", choose);
  return row;
}

// A table of names and values; empty values are left out.
function makeFacts(pairs) {
  const list = make("dl");
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(make("dt", "", name), make("dd", "", String(value).slice(0, WORDS_CHARACTERS)));
  }
  return list;
}
const WORDS_CHARACTERS = 20000;

// The bytes of a column, whose byte order is that of every machine with a browser.
function bytesOf(encoded) {
  const characters = atob(encoded);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes.buffer;
}

const whole = new Intl.NumberFormat("en-US");
const counts = (fates) => Object.entries(fates || {}).map(([name, count]) => whole.format(count) + " " + name).join(", ");
const plural = (count, noun) => whole.format(count) + " " + noun + (count === 1 ? "" : "s");
const digits = (number) => typeof number === "number" ? Math.abs(number) < 1000 ? String(Number(number.toPrecision(3))) : whole.format(number) : String(number);
const isTrained = (fate) => fate === "trained" || fate === "masked";
const mean = (numbers) => numbers.reduce((sum, each) => sum + each, 0) / numbers.length;

const SIDES = ["A", "B"];
const nameOf = (line) => (run.sides > 1 ? SIDES[line.side] + " " : "") + (line.number === null ? (line.id || "none").slice(0, 8) : line.number);
const keyOf = (line) => (run.sides > 1 ? SIDES[line.side] + "." : "") + (line.id || line.number);

// Outcomes in four classes, which differ in color and shape; the fifth is a session without an end.
const STANDINGS = { finished: "finished", limited: "limited", drained: "aborted", gone: "aborted", aborted: "aborted", deleted: "aborted" };
const GOES_ON = new Set(["open", "closing", "ended", "tool", "engine", "held", "queued", "idle"]);
const outcomeOf = (line) => line.outcome || "no outcome";
function standingOf(line) {
  if (!line.outcome || GOES_ON.has(line.outcome)) return "going";
  return STANDINGS[line.outcome] || (line.cause || run.suite ? "failed" : "aborted");
}
