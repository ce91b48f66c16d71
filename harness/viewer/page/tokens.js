// The tokens of the open session, in rows: colored, found by version and by where they go, and told one by one.
const ROW_HEIGHT = 22;
const ROW_CHARACTERS = 110;
const ROW_TOKENS = 48; // so that a window of single letters is not thousands of elements
const TOKEN_CHARACTERS = 60;
const COLORS = ["mask", "version", "logprob"];
let rows = [];
let color = 0;
let told = null; // the token whose values stand above the strip: its turn's place, and its own
const strip = new Windowed(byId("strip"), ROW_HEIGHT, makeTokens);

// Rows of tokens, by their lengths.
function layOutRows() {
  rows = [];
  session.versions = [...new Set(session.turns.flatMap((turn) => turn.versions.map((each) => String(each.version))))];
  session.turns.forEach((turn, place) => {
    if (typeof turn.tokens === "string") {
      turn.tokens = column(turn.tokens, Uint32Array);
      turn.logprobs = column(turn.logprobs, Float32Array);
    }
    turn.row = rows.length;
    rows.push({ place, from: -1, to: -1 });
    let from = 0;
    let used = 0;
    for (let i = 0; i < turn.tokens.length; i++) {
      const [id, text] = table[turn.tokens[i]];
      used += Math.min(TOKEN_CHARACTERS, text === null ? String(id).length + 1 : text.length) || 1;
      const ends = text !== null && text.endsWith("\n");
      if (used >= ROW_CHARACTERS || i + 1 - from >= ROW_TOKENS || ends || i + 1 === turn.tokens.length || i + 1 === turn.context) {
        rows.push({ place, from, to: i + 1 });
        from = i + 1;
        used = 0;
      }
    }
  });
  offer("version", ["", ...session.versions], (version) => version ? "version " + version : "every version");
  offer("fate", ["", ...session.turns.flatMap((turn) => Object.keys(turn.fates))], (fate) => fate || "every fate");
}

function layOutTokens() {
  told = null;
  byId("value").textContent = "";
  for (const id of ["version", "fate"]) byId(id).replaceChildren();
  layOutRows();
  byId("strip").scrollTop = 0;
  find();
  strip.show(rows.length);
}

function showTokensOf(place) {
  strip.reveal(session.turns[place].row, true);
}

function token(turn, i) {
  const [id, text] = table[turn.tokens[i]];
  const position = i - turn.context;
  if (position < 0) return { id, text, position, logprob: null, version: null, fate: "context" };
  const logprob = turn.logprobs[position];
  const span = turn.versions.find((each) => position >= each.start && position < each.end);
  const isDelivered = turn.fate === "trained" || turn.fate === "masked";
  return {
    id, text, position,
    logprob: logprob === logprob ? logprob : null,
    version: span ? String(span.version) : null,
    fate: isDelivered ? (position < turn.masked_from ? "trained" : "masked") : turn.fate,
  };
}

// The sampled tokens of a turn that have the version and the fate asked for, as ranges of places.
function foundIn(turn) {
  const version = byId("version").value;
  const fate = byId("fate").value;
  const end = turn.tokens.length;
  const first = turn.context;
  const isDelivered = turn.fate === "trained" || turn.fate === "masked";
  const joint = Math.min(end, first + turn.masked_from);
  const parts = isDelivered ? [[first, joint, "trained"], [joint, end, "masked"]] : [[first, end, turn.fate]];
  const spans = version ? turn.versions.filter((each) => String(each.version) === version) : [{ start: 0, end }];
  const ranges = [];
  for (const [from, to, name] of parts) {
    if (fate && fate !== name) continue;
    for (const span of spans) {
      const range = [Math.max(from, first + span.start), Math.min(to, first + span.end)];
      if (range[0] < range[1]) ranges.push(range);
    }
  }
  return ranges;
}

const isAsked = () => byId("version").value !== "" || byId("fate").value !== "";

function tellFound() {
  find();
  strip.drawAnew();
}

function find() {
  let found = 0;
  const turns = [];
  for (const turn of session.turns) {
    turn.found = foundIn(turn);
    const count = turn.found.reduce((sum, [from, to]) => sum + to - from, 0);
    if (count) turns.push(turn.index);
    found += count;
  }
  const where = turns.slice(0, 20).join(", ") + (turns.length > 20 ? " and " + (turns.length - 20) + " more" : "");
  byId("found").textContent = isAsked() ? found + " tokens" + (found ? ", in turn " + where : "") : "";
}

// The next token that was asked for behind the one that is told, or the one before it; from the end it goes on anew.
function goToFound(step) {
  const ranges = session.turns.flatMap((turn, place) => turn.found.map(([from, to]) => ({ place, from, to })));
  if (!ranges.length) return;
  const at = ranges.findIndex((each) => told && each.place === told.place && told.i >= each.from && told.i < each.to);
  const next = ranges[at < 0 ? (step > 0 ? 0 : ranges.length - 1) : (at + step + ranges.length) % ranges.length];
  tell(next.place, next.from, true);
}

// To the token behind the one that is told, or before it.
function step(by) {
  if (!told) { tell(turnChosen, 0, true); return; }
  const i = told.i + by;
  if (i >= 0 && i < session.turns[told.place].tokens.length) { tell(told.place, i, true); return; }
  const place = told.place + by;
  if (session.turns[place]) tell(place, by > 0 ? 0 : session.turns[place].tokens.length - 1, true);
}

function tell(place, i, comesIntoSight) {
  const turn = session.turns[place];
  if (!(i >= 0 && i < turn.tokens.length)) return;
  const before = told;
  told = { place, i, row: rowOf(place, i) };
  if (before) strip.change(before.row);
  strip.change(told.row);
  if (comesIntoSight) strip.reveal(told.row);
  byId("value").textContent = say(turn, token(turn, i));
}

function rowOf(place, i) {
  let low = session.turns[place].row + 1;
  let high = place + 1 < session.turns.length ? session.turns[place + 1].row : rows.length;
  while (low + 1 < high) {
    const middle = (low + high) >> 1;
    if (rows[middle].from <= i) low = middle; else high = middle;
  }
  return low;
}

function say(turn, value) {
  const text = value.text === null ? "no text" : JSON.stringify(value.text.slice(0, 1000));
  return printable("turn " + turn.index + (value.position < 0 ? " context" : " token " + value.position) + "  id " + value.id +
    "  " + value.fate + "  logprob " + (value.logprob === null ? "-" : value.logprob) +
    "  version " + (value.version === null ? "-" : value.version) + "  " + text);
}

function makeTokens(at) {
  const { place, from, to } = rows[at];
  const turn = session.turns[place];
  const row = make("div", from < 0 ? "tokens head" : "tokens");
  if (from < 0) row.textContent = "turn " + turn.index;
  const asked = isAsked();
  for (let i = Math.max(0, from); i < to; i++) {
    const value = token(turn, i);
    const text = value.text === null ? "#" + value.id : value.text;
    const span = make("span", "token", text.length > TOKEN_CHARACTERS ? text.slice(0, TOKEN_CHARACTERS) + "\u2026" : text);
    paint(span, value);
    if (asked && !turn.found.some((range) => i >= range[0] && i < range[1])) span.classList.add("other");
    if (told && told.place === place && told.i === i) span.classList.add("chosen");
    row.append(span);
  }
  return row;
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

function nextColor() {
  color = (color + 1) % COLORS.length;
  byId("color").textContent = "color: " + COLORS[color];
  strip.drawAnew();
}

// The token under the mouse.
function point(event) {
  const row = event.target.parentElement;
  if (!event.target.classList.contains("token") || !row) return;
  for (const [at, element] of strip.drawn) {
    if (element !== row) continue;
    const { place, from } = rows[at];
    const turn = session.turns[place];
    byId("value").textContent = say(turn, token(turn, from + [...row.children].indexOf(event.target)));
  }
}
