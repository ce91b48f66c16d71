"use strict";
// What was recorded, read out of the page. Every text comes from JSON and goes into the page by `textContent`: nothing
// that was recorded is markup here.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029]/u;
const EVERY_UNSEEN = new RegExp(UNSEEN, "gu");

const byId = (id) => document.getElementById(id);
const read = (id) => JSON.parse(byId(id).textContent);
const run = read("run");
const table = read("texts");

// Control characters and marks of direction, written out; a newline and a tab stay where there are lines.
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

// A row of a list: its cells stand in the columns that the style has for the list.
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
const CELL_CHARACTERS = 300;

// A column of 4-byte little-endian numbers, as every machine has them that runs a browser.
function column(encoded, Numbers) {
  const characters = atob(encoded);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return new Numbers(bytes.buffer);
}

const counts = (fates) => Object.entries(fates).map(([name, count]) => count + " " + name).join(", ");
