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
  facts.append(make("div", "", [run.suite, run.status].filter(Boolean).join(": ") || "a store"));
  for (const start of run.starts) facts.append(make("div", "dim", start.command.join(" ")));
  if (run.ledger) facts.append(make("div", "dim", "ledger: " + run.ledger));
  for (const sentence of run.missing) facts.append(make("div", "missing", "missing: " + sentence));
  const outcomes = [...new Set(run.sessions.map((each) => each.outcome || "no outcome"))];
  for (const outcome of ["", ...outcomes]) addOption("outcome", outcome, outcome || "every outcome");
}

function addOption(select, value, words) {
  const option = make("option", "", words);
  option.value = value;
  byId(select).append(option);
}

function filter() {
  const words = byId("filter").value.toLowerCase();
  const outcome = byId("outcome").value;
  const before = shown[chosen];
  shown = run.sessions.filter((each) =>
    (!outcome || (each.outcome || "no outcome") === outcome) &&
    (!words || [each.number, each.id, each.scenario, each.outcome, each.cause, each.why].join(" ").toLowerCase().includes(words)));
  chosen = Math.max(0, shown.indexOf(before));
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
