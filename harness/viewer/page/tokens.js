// The tokens of the open session, in rows: hue by fate, strength by logprob, underline by version. The legend filters.
const ROW_HEIGHT = 24;
const CHARACTER_WIDTH = 7.9;
const ROW_TOKENS = 48; // so that a window of single letters is not thousands of elements
const TOKEN_CHARACTERS = 60;
const LEVELS = [["p \u2265 0.9", Math.log(0.9)], ["p \u2265 0.5", Math.log(0.5)], ["p \u2265 0.1", Math.log(0.1)], ["p < 0.1", -Infinity]];
const levelOf = (logprob) => logprob === null ? -1 : LEVELS.findIndex(([, least]) => logprob >= least);
const asked = { fate: "", version: "", level: "" };
let rows = []; // none before the tokens are first looked at
let told = null; // the token in the detail pane: its turn's place, its own, and its row
const strip = new Windowed(byId("strip"), ROW_HEIGHT, makeTokens);

// The tokens of a turn, whose columns are read when they are first asked for.
function tokensOf(turn) {
  if (typeof turn.tokens === "string") {
    turn.logprobs = new Float32Array(bytesOf(turn.logprobs));
    const bytes = bytesOf(turn.tokens);
    turn.tokens = bytes.byteLength > 2 * (turn.context + turn.logprobs.length) ? new Uint32Array(bytes) : new Uint16Array(bytes);
  }
  return turn.tokens;
}

function layOutRows() {
  rows = [];
  const most = Math.max(20, Math.floor((document.querySelector("main").clientWidth - 48) / CHARACTER_WIDTH));
  session.versions = [...new Set(session.turns.flatMap((turn) => turn.versions.map((each) => String(each.version))))];
  session.turns.forEach((turn, place) => {
    tokensOf(turn);
    turn.row = rows.length;
    rows.push({ place, from: -1, to: -1 });
    let from = 0;
    let used = 0;
    for (let i = 0; i < turn.tokens.length; i++) {
      const [id, text] = table[turn.tokens[i]];
      const length = Math.min(TOKEN_CHARACTERS, text === null ? String(id).length + 1 : text.length) || 1;
      if (used && used + length > most) {
        rows.push({ place, from, to: i });
        from = i;
        used = 0;
      }
      used += length;
      const ends = text !== null && text.endsWith("\n");
      if (i + 1 - from >= ROW_TOKENS || ends || i + 1 === turn.tokens.length || i + 1 === turn.context) {
        rows.push({ place, from, to: i + 1 });
        from = i + 1;
        used = 0;
      }
    }
  });
}

function forgetTokens() {
  told = null;
  for (const kind of Object.keys(asked)) asked[kind] = "";
  rows = [];
  tellToken();
  strip.show(0);
}

function showTokens() {
  if (!rows.length) {
    layOutRows();
    strip.show(rows.length);
  }
  find();
  showTokensOf(turnChosen);
}

const showTokensOf = (place) => { if (session.turns.length) strip.reveal(told ? told.row : session.turns[place].row, !told); };

function token(turn, i) {
  const [id, text] = table[turn.tokens[i]];
  const position = i - turn.context;
  if (position < 0) return { id, text, position, logprob: null, version: null, fate: "context" };
  const logprob = turn.logprobs[position];
  const span = turn.versions.find((each) => position >= each.start && position < each.end);
  return {
    id, text, position,
    logprob: logprob === logprob ? logprob : null,
    version: span ? String(span.version) : null,
    fate: isTrained(turn.fate) ? (position < turn.masked_from ? "trained" : "masked") : turn.fate,
  };
}

const isAsked = () => Object.values(asked).some(Boolean);

function askFor(kind, value) {
  asked[kind] = asked[kind] === value ? "" : value;
  find();
  strip.drawAnew();
}

// The parts of an output, each of one fate and one version.
function* stretches(turn) {
  const length = turn.tokens.length - turn.context;
  const edges = [0, turn.masked_from, length, ...turn.versions.flatMap((each) => [each.start, each.end])];
  const sorted = [...new Set(edges)].filter((each) => each >= 0 && each <= length).sort((one, other) => one - other);
  for (let at = 1; at < sorted.length; at++) yield [sorted[at - 1], sorted[at]];
}

// Which tokens have everything that is asked for, and the counts of the legend.
function find() {
  const tally = { fate: new Map(), version: new Map(), level: new Map() };
  const add = (kind, value, count) => tally[kind].set(value, (tally[kind].get(value) || 0) + count);
  const fits = (kind, value) => !asked[kind] || asked[kind] === value;
  const turns = [];
  let found = 0;
  for (const turn of session.turns) {
    const before = found;
    const levels = new Uint32Array(LEVELS.length + 1);
    turn.matched = new Uint8Array(turn.tokens.length);
    for (const [from, to] of stretches(turn)) {
      const { fate, version } = token(turn, turn.context + from);
      add("fate", fate, to - from);
      add("version", version, to - from);
      const isMatch = fits("fate", fate) && fits("version", version);
      for (let at = from; at < to; at++) {
        const level = levelOf(turn.logprobs[at]);
        levels[level + 1]++;
        if (isMatch && fits("level", String(level))) found += turn.matched[turn.context + at] = 1;
      }
    }
    levels.forEach((count, at) => { if (count) add("level", String(at - 1), count); });
    if (found > before) turns.push(turn.index);
  }
  const where = turns.slice(0, 20).join(", ") + (turns.length > 20 ? " and " + (turns.length - 20) + " more" : "");
  byId("found").textContent = isAsked() ? plural(found, "token") + (found ? ", in turn " + where : "") : "";
  byId("legend").replaceChildren(...legend(tally));
}

function* legend(tally) {
  for (const [kind, title] of [["fate", "where it goes"], ["version", "weights"], ["level", "probability"]]) {
    const group = make("span", "chips");
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", title);
    group.append(make("span", "dim", title));
    for (const [value, count] of [...tally[kind]].sort(kind === "level" ? ([one], [other]) => one - other : undefined)) {
      if (value === null || value === "-1") continue;
      const words = kind === "level" ? LEVELS[value][0] : kind === "fate" && !isTrained(value) ? "dropped: " + value : value;
      const chip = makeButton(words, () => askFor(kind, value));
      chip.setAttribute("aria-pressed", String(asked[kind] === value));
      chip.className = "chip " + (kind === "fate" ? classOf(value) : kind === "level" ? "trained level" + value : underlineOf(value));
      chip.append(make("small", "", whole.format(count)));
      group.append(chip);
    }
    if (group.children.length > 1) yield group;
  }
}

// To the first token of the next stretch of those asked for, or of the one before; from an end it continues at the other.
function goToFound(step) {
  const begins = session.turns.flatMap((turn, place) => {
    const found = [];
    turn.matched.forEach((is, i) => { if (is && !turn.matched[i - 1]) found.push({ place, i }); });
    return found;
  });
  if (!begins.length) return;
  const by = ({ place, i }) => told ? place - told.place || i - told.i : 1; // from the token that is told to this one
  const next = step > 0 ? begins.find((each) => by(each) > 0) || begins[0] : begins.findLast((each) => by(each) < 0) || begins.at(-1);
  tell(next.place, next.i, true);
}

function step(by) {
  if (!told) { tell(turnChosen, 0, true); return; }
  const i = told.i + by;
  if (i >= 0 && i < session.turns[told.place].tokens.length) { tell(told.place, i, true); return; }
  const place = told.place + by;
  if (session.turns[place]) tell(place, by > 0 ? 0 : session.turns[place].tokens.length - 1, true);
}

function tell(place, i, comesIntoSight) {
  const turn = session.turns[place];
  if (!turn || !(i >= 0 && i < turn.tokens.length)) return;
  const before = told;
  told = { place, i, row: rowOf(place, i) };
  if (before) strip.change(before.row);
  strip.change(told.row);
  if (comesIntoSight) strip.reveal(told.row);
  tellToken();
  address();
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

function tellToken() {
  const turn = told && session.turns[told.place];
  if (!turn) { byId("token").replaceChildren(make("h2", "", "token"), make("p", "dim", "Choose a token in Tokens: arrows move, n goes to the next one asked for.")); return; }
  const value = token(turn, told.i);
  const text = value.text === null ? "no text" : JSON.stringify(value.text.slice(0, 1000));
  byId("token").replaceChildren(make("h2", "", "token " + value.position + " of turn " + turn.index), makeFacts([
    ["text", text], ["id", value.id],
    ["logprob", value.logprob === null ? "\u2013" : value.logprob + " (p " + digits(Math.exp(value.logprob)) + ")"],
    ["version", value.version], ["goes to", isTrained(value.fate) || value.fate === "context" ? value.fate : "dropped: " + value.fate],
    ["mask", value.fate === "trained" ? 1 : 0], ["position", whole.format(turn.prompt + value.position) + " of the conversation"],
  ]));
}

function makeTokens(at) {
  const { place, from, to } = rows[at];
  const turn = session.turns[place];
  const row = make("div", from < 0 ? "tokens head" : "tokens");
  if (from < 0) row.textContent = "turn " + turn.index + (turn.role === "main" ? "" : " \u00b7 " + printable(turn.role));
  const isFiltered = isAsked();
  for (let i = Math.max(0, from); i < to; i++) {
    const value = token(turn, i);
    const span = makeToken(value);
    if (isFiltered && !turn.matched[i]) span.classList.add("other");
    if (told && told.place === place && told.i === i) span.classList.add("chosen");
    span.addEventListener("click", () => tell(place, i));
    row.append(span);
  }
  return row;
}

function makeToken(value) {
  const text = value.text === null ? "#" + value.id : value.text;
  const span = make("span", "token " + classOf(value.fate), text.length > TOKEN_CHARACTERS ? text.slice(0, TOKEN_CHARACTERS) + "\u2026" : text);
  if (value.fate !== "context") span.classList.add("level" + levelOf(value.logprob), underlineOf(value.version));
  return span;
}

const classOf = (fate) => isTrained(fate) || fate === "context" ? fate : "dropped";
const underlineOf = (version) => "version" + session.versions.indexOf(version) % 4;
