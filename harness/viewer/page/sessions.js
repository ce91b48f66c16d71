// The sessions, by prompt: a filter leaves some of them, and one of those is chosen.
const SESSION_HEIGHT = 44;
const BARS_OF_PROMPT = 16;
let shown = [];
let chosen = 0;
let items = []; // rows of the list: a prompt, or the place of a session in `shown`
let rowsOf = []; // the row of each shown session
const sessionRows = new Windowed(byId("sessions"), SESSION_HEIGHT, (at) => {
  const item = items[at];
  return item.prompt === undefined ? makeSession(item.place) : makePrompt(item);
});

function makeSession(place) {
  const line = shown[place];
  const row = make("div", "session" + (place === chosen ? " chosen" : ""));
  row.setAttribute("role", "option");
  row.setAttribute("aria-selected", String(place === chosen));
  const mark = make("i", "standing " + standingOf(line));
  const first = make("div", "line");
  const tokens = line.sampled === null ? "" : whole.format(line.sampled) + " tokens";
  first.append(mark, make("b", "", nameOf(line)), make("span", "outcome", outcomeOf(line)),
    make("span", "count", line.turns === null ? "" : plural(line.turns, "turn")), make("span", "count", tokens),
    make("span", "reward", line.reward === null ? "\u2013" : digits(line.reward)));
  const why = line.why || line.reason || (line.number === null ? "" : (line.id || "").slice(0, 8));
  row.append(first, make("div", "line reason", why.slice(0, CELL_CHARACTERS)));
  row.title = printable([line.id, line.why, line.reason].filter(Boolean).join("\n").slice(0, 1000), true);
  row.addEventListener("click", () => { choose(place); open(); });
  return row;
}

function makePrompt({ prompt, lines }) {
  const row = make("div", "prompt");
  row.setAttribute("role", "presentation");
  const rewards = lines.map((line) => line.reward).filter((reward) => typeof reward === "number");
  const bars = make("span", "bars");
  const most = Math.max(1e-9, ...rewards.map(Math.abs));
  for (const line of lines.slice(0, BARS_OF_PROMPT)) {
    const bar = make("i", line.reward === null ? "none" : line.reward < 0 ? "below" : "");
    bar.style.height = (10 + 90 * Math.abs(rewardOf(line) === -Infinity ? 0 : line.reward) / most) + "%";
    bars.append(bar);
  }
  const first = make("div", "line");
  first.append(make("b", "", prompt), bars, make("span", "reward", rewards.length ? digits(mean(rewards)) : "\u2013"));
  const spread = rewards.length ? ", rewards " + digits(Math.min(...rewards)) + " to " + digits(Math.max(...rewards)) : "";
  row.append(first, make("div", "line reason", plural(lines.length, "session") + spread));
  return row;
}

const promptOf = (line) => line.group === null || line.group === undefined ? "" : (line.scenario || "") + " prompt " + (line.group + 1);
const rewardsOf = (lines) => lines.map((line) => line.reward).filter((reward) => typeof reward === "number");
const worth = (lines) => rewardsOf(lines).length ? mean(rewardsOf(lines)) : Infinity;

// Shown sessions in the order asked for, and the rows of the list: prompts stand above their sessions.
function layOutSessions(lines) {
  const order = byId("order").value || "played";
  const prompts = new Map();
  for (const line of lines) {
    const prompt = promptOf(line);
    prompts.set(prompt, [...(prompts.get(prompt) || []), line]);
  }
  const groups = [...prompts];
  if (SORTS[order]) {
    for (const [, each] of groups) each.sort(SORTS[order]);
    groups.sort(([, one], [, other]) =>
      order === "slowest" ? secondsOf(other[0]) - secondsOf(one[0]) : worth(one) - worth(other));
  }
  else if (run.sides > 1) for (const [, each] of groups) each.sort((one, other) => one.number - other.number || one.side - other.side);
  items = [];
  rowsOf = [];
  const sorted = [];
  for (const [prompt, each] of groups) {
    if (prompt) items.push({ prompt, lines: each });
    for (const line of each) {
      rowsOf.push(items.length);
      items.push({ place: sorted.length });
      sorted.push(line);
    }
  }
  return sorted;
}

// A change that a person makes chooses the first session, unless the chosen one is still there.
function filter(asked) {
  const next = layOutSessions(matches());
  byId("none").hidden = next.length > 0 || !run.sessions.length;
  if (!asked && next.length === shown.length && next.every((each, at) => each === shown[at])) return;
  const at = next.indexOf(shown[chosen]);
  shown = next;
  chosen = Math.max(0, at < 0 && !asked ? Math.min(chosen, shown.length - 1) : at);
  sessionRows.show(items.length);
  showLanes();
}

function choose(at) {
  const before = chosen;
  chosen = Math.max(0, Math.min(shown.length - 1, at));
  for (const place of [before, chosen]) {
    sessionRows.change(rowsOf[place]);
    lanes.change(place);
  }
  sessionRows.reveal(rowsOf[chosen]);
  lanes.reveal(chosen);
}
