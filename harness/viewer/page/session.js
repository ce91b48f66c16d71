// The session that is open: how it ended, its turns, and the words of the turn that is chosen.
const TURN_HEIGHT = 20;
const WORDS_CHARACTERS = 20000; // of a message, until more are asked for
const MORE_CHARACTERS = 200000;
const MESSAGES = 200;
let session = null;
let opened = null; // its line
let turnChosen = 0;
const turnRows = new Windowed(byId("turns"), TURN_HEIGHT, (at) => {
  const turn = session.turns[at];
  const values = ["  ".repeat(Math.min(turn.depth, 20)) + (turn.depth ? "+ " : "") + turn.index, turn.status, turn.end,
    turn.versions.map((each) => each.version).join(", "), turn.prompt, turn.sampled, turn.seconds.toFixed(2),
    counts(turn.fates) + (turn.unknown ? ", at most " + turn.unknown + " unknown" : "")];
  return makeRow(values, at === turnChosen, () => chooseTurn(at));
});

// The session of a line; the live page has another way.
let bring = (line) => line.element === null ? { turns: [], ledger: null, phase: "not here", refusals: {} } : read(line.element);

function open() {
  const line = shown[chosen];
  byId("session").hidden = !line;
  if (!line) return;
  opened = line;
  session = bring(line);
  turnChosen = 0;
  tellSession();
  turnRows.show(session.turns.length);
  turnRows.reveal(0);
  layOutTokens();
  showWords();
}

function tellSession() {
  const line = opened;
  byId("name").textContent = printable((line.number === null ? "" : "session " + line.number + ": ") + (line.id || "no session") + ", " + session.phase);
  const grows = run.live && line.sampled + " tokens so far";
  const why = [line.outcome, line.cause && "by the " + line.cause, line.why, line.log, grows, session.missing].filter(Boolean).join("; ");
  byId("why").replaceChildren(
    make("div", "", why.slice(0, WORDS_CHARACTERS)), make("div", "dim", "ledger: " + (session.ledger || "none")),
    make("div", "dim", "refused: " + (counts(session.refusals) || "nothing")));
}

function close() {
  byId("session").hidden = true;
  session = opened = null;
}

function chooseTurn(at) {
  const before = turnChosen;
  turnChosen = Math.max(0, Math.min(session.turns.length - 1, at));
  turnRows.change(before);
  turnRows.change(turnChosen);
  turnRows.reveal(turnChosen);
  showWords();
  showTokensOf(turnChosen);
}

function showWords() {
  const turn = session.turns[turnChosen];
  const words = turn ? turn.words : [];
  const left = words.length - MESSAGES;
  const parts = words.slice(-MESSAGES).flatMap(([role, said]) => makeWords(role, said));
  if (left > 0) parts.unshift(make("div", "missing", left + " messages before these are not shown"));
  byId("transcript").replaceChildren(...parts);
  byId("transcript").scrollTop = 0;
}

function makeWords(role, words) {
  const block = make("pre", "words", words.slice(0, WORDS_CHARACTERS));
  const parts = [make("div", role === "error" ? "error" : "dim", role), block];
  let until = WORDS_CHARACTERS;
  if (words.length > until) {
    const more = make("button", "more");
    const tell = () => { more.textContent = "more of the " + words.length + " characters"; more.hidden = until >= words.length; };
    more.addEventListener("click", () => {
      block.append(printable(words.slice(until, until + MORE_CHARACTERS), true));
      until += MORE_CHARACTERS;
      tell();
    });
    tell();
    parts.push(more);
  }
  return parts;
}
