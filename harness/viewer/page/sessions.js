// The facts of the run, and its sessions: a filter leaves some of them, and one of those is chosen.
const SESSION_HEIGHT = 20;
let shown = [];
let chosen = 0;
const sessionRows = new Windowed(byId("sessions"), SESSION_HEIGHT, (at) => {
  const { number, id, scenario, outcome, turns, sampled, reward, why } = shown[at];
  const name = id === null ? "none" : id.slice(0, 8);
  return makeRow([number, name, scenario, outcome, turns, sampled, reward, why], at === chosen, () => { choose(at); open(); });
});

function overview() {
  const facts = byId("facts");
  facts.replaceChildren(make("div", "", [run.suite, run.status].filter(Boolean).join(": ") || (run.live ? run.source : "a store")));
  for (const sentence of run.said || []) facts.append(make("div", "dim", sentence));
  for (const start of run.starts) facts.append(make("div", "dim", start.command.join(" ")));
  if (run.ledger) facts.append(make("div", "dim", "ledger: " + run.ledger));
  for (const sentence of run.missing) facts.append(make("div", "missing", "missing: " + sentence));
}

// Of a field, the options that it does not have yet; the one that is chosen stays.
function offer(select, values, wordsOf) {
  const offered = new Set([...byId(select).options].map((each) => each.value));
  for (const value of new Set(values)) if (!offered.has(value)) addOption(select, value, wordsOf(value));
}

function offerOutcomes() {
  offer("outcome", ["", ...run.sessions.map((each) => each.outcome || "no outcome")], (outcome) => outcome || "every outcome");
}

function addOption(select, value, words) {
  const option = make("option", "", words);
  option.value = value;
  byId(select).append(option);
}

// Asked for by a person, it chooses the first one, unless the one that was chosen is still there.
function filter(asked) {
  const words = byId("filter").value.toLowerCase();
  const outcome = byId("outcome").value;
  const next = run.sessions.filter((each) =>
    (!outcome || (each.outcome || "no outcome") === outcome) &&
    (!words || [each.number, each.id, each.scenario, each.outcome, each.cause, each.why].join(" ").toLowerCase().includes(words)));
  if (next.length === shown.length && next.every((each, at) => each === shown[at])) return;
  const at = next.indexOf(shown[chosen]);
  shown = next;
  chosen = Math.max(0, at < 0 && !asked ? Math.min(chosen, shown.length - 1) : at);
  sessionRows.show(shown.length);
  showLanes();
}

function choose(at) {
  const before = chosen;
  chosen = Math.max(0, Math.min(shown.length - 1, at));
  for (const rows of [sessionRows, lanes]) {
    rows.change(before);
    rows.change(chosen);
    rows.reveal(chosen);
  }
}
