// Two sessions side by side: their ends, and the first token of a prompt or an output that only one of them has.
const AROUND_TOKENS = 120;

function offerPartners() {
  const field = byId("against");
  field.parentElement.hidden = run.live; // of a server the page holds one session at a time
  field.replaceChildren();
  const others = run.sessions.filter((line) => line !== opened && line.element !== null);
  const partner = run.sessions[opened.partner];
  offer("against", ["", ...[partner, ...others].filter(Boolean).slice(0, MOST_OFFERED).map((line) => run.sessions.indexOf(line))], (place) =>
    place === "" ? "another session" : nameOf(run.sessions[place]) + " \u00b7 " + outcomeOf(run.sessions[place]));
  field.value = partner ? opened.partner : "";
}

// Turns are compared in order of admission, by parent and tokens. Logprobs and versions do not count.
function firstDifference(one, other) {
  const [first, second] = [one, other].map((each) => [...each.turns].sort((a, b) => a.index - b.index));
  for (let at = 0; at < Math.min(first.length, second.length); at++) {
    const turns = [first[at], second[at]];
    if (turns[0].parent !== turns[1].parent) return { turns, part: "the turn that it continues" };
    for (const part of ["prompt", "output"]) {
      const [ids, others] = turns.map((turn) => part === "prompt" ? turn.tokens.subarray(0, turn.context) : turn.tokens.subarray(turn.context));
      const length = Math.max(ids.length, others.length);
      for (let i = 0; i < length; i++) {
        if (i >= ids.length || i >= others.length || table[ids[i]][0] !== table[others[i]][0]) return { turns, part, position: i };
      }
    }
  }
  if (first.length === second.length) return null;
  const at = Math.min(first.length, second.length);
  return { turns: [first[at], second[at]], part: "its existence" };
}

function showComparison() {
  const place = byId("against").value;
  if (place === "") { byId("compare").replaceChildren(make("p", "empty", "Choose a session in \u201ccompare with\u201d.")); return; }
  const lines = [opened, run.sessions[place]];
  const sessions = [session, bring(lines[1])];
  for (const each of sessions) each.turns.forEach(tokensOf);
  const found = firstDifference(...sessions);
  const words = lines.some((line) => line.element === null) ? "The turns of one of them are not in this page."
    : !found ? "The same tokens in the same turns."
    : "First difference: turn " + (found.turns[0] || found.turns[1]).index + ", " + found.part + (found.position === undefined ? "" : ", token " + found.position);
  const columns = make("div", "sides");
  lines.forEach((line, side) => {
    const column = make("section", "side");
    column.setAttribute("aria-label", "session " + nameOf(line));
    column.append(make("h2", "", "session " + nameOf(line)), makeFacts([
      ["outcome", outcomeOf(line)], ["reward", line.reward === null ? "\u2013" : digits(line.reward)], ["turns", line.turns], ["tokens", line.sampled], ["reason", line.why || line.reason]]));
    if (found) column.append(makeParting(found.turns[side], found));
    columns.append(column);
  });
  byId("compare").replaceChildren(make("h2", found ? "parts" : "", words), columns);
}

// The tokens of a turn around the first that differs, which is marked.
function makeParting(turn, { part, position }) {
  if (!turn) return make("p", "empty", "It has no such turn.");
  const block = make("div", "parting");
  block.append(make("div", "who", "turn " + turn.index + (turn.parent === null ? "" : ", continues turn " + turn.parent)));
  if (position === undefined) return block;
  const at = (part === "prompt" ? 0 : turn.context) + position;
  const end = part === "prompt" ? turn.context : turn.tokens.length;
  for (let i = Math.max(0, at - AROUND_TOKENS); i < Math.min(end, at + AROUND_TOKENS); i++) {
    const [id, text] = table[turn.tokens[i]];
    block.append(make(i === at ? "mark" : "span", "", text === null ? "#" + id + " " : text));
  }
  if (at >= end) block.append(make("mark", "", "ends here"));
  return block;
}
