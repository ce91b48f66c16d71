// Search and filters of the list of sessions, and its order.
const REWARDS = {
  "": ["reward", () => true],
  none: ["no reward", (reward) => reward === null],
  zero: ["reward 0 or less", (reward) => reward !== null && reward <= 0],
  positive: ["reward above 0", (reward) => reward > 0],
};
const ORDERS = { played: "as played", worst: "worst first", slowest: "slowest first" };
const secondsOf = (line) => Math.max(0, ...line.times.map((time) => time[1] || 0));
const SORTS = {
  worst: (one, other) => rewardOf(one) - rewardOf(other),
  slowest: (one, other) => secondsOf(other) - secondsOf(one),
};
const rewardOf = (line) => typeof line.reward === "number" ? line.reward : -Infinity;

// The options that a field lacks; its chosen one stays.
function offer(select, values, wordsOf) {
  const offered = new Set([...byId(select).options].map((each) => each.value));
  for (const value of new Set(values)) {
    if (offered.has(value)) continue;
    const option = make("option", "", wordsOf(value));
    option.value = value;
    byId(select).append(option);
  }
}

function offerFilters() {
  offer("order", Object.keys(ORDERS), (order) => ORDERS[order]);
  offer("rewarded", Object.keys(REWARDS), (name) => REWARDS[name][0]);
  offer("outcome", ["", ...run.sessions.map(outcomeOf)], (outcome) => outcome || "outcome");
  offer("role", ["", ...run.sessions.flatMap((line) => line.roles || [])], (role) => role ? "has " + role + " calls" : "role");
  offer("weights", ["", ...run.sessions.flatMap((line) => line.versions || [])], (version) => version ? "version " + version : "weights");
}

// The words of a session: of the list at once, of its turns when a search needs them.
function findWords(line, words) {
  const listed = [nameOf(line), line.id, line.scenario, line.outcome, line.cause, line.why, line.reason].join(" ").toLowerCase();
  if (listed.includes(words)) return true;
  if (line.said === undefined && line.element) {
    const { turns, metadata } = read(line.element);
    line.said = JSON.stringify([metadata, turns.map(({ messages, reply, error }) => [messages, reply, error])]).toLowerCase();
  }
  const quoted = JSON.stringify(words).slice(1, -1);
  return (line.said || "").includes(quoted);
}

function matches() {
  const words = byId("filter").value.toLowerCase();
  const [outcome, role, version] = ["outcome", "role", "weights"].map((id) => byId(id).value);
  const isRewarded = REWARDS[byId("rewarded").value][1];
  return run.sessions.filter((line) =>
    (!outcome || outcomeOf(line) === outcome) && isRewarded(line.reward) &&
    (!role || (line.roles || []).includes(role)) && (!version || (line.versions || []).includes(version)) &&
    (!words || findWords(line, words)));
}

function clearFilters() {
  for (const id of ["filter", "outcome", "rewarded", "role", "weights"]) byId(id).value = "";
  filter(true);
}
