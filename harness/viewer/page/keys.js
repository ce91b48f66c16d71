// Everything that the page does can be done by keys. One table says them, in the overlay and to the keyboard.
const KEYS = [
  ["j k", "next, previous session; of an open session: turn", { j: () => move(1), k: () => move(-1) }],
  ["J K", "open the next, previous session", { J: () => moveSession(1), K: () => moveSession(-1) }],
  ["Enter", "open the chosen session", { Enter: () => open() }],
  ["Escape", "leave a field; close the session; clear the filters", {}],
  ["1 to " + Object.keys(TABS).length, Object.keys(TABS).join(", "), Object.fromEntries(Object.keys(TABS).map((name, at) => [at + 1, () => session && showTab(name)]))],
  ["n N", "next, previous stretch of the tokens asked for", { n: () => inTokens(() => goToFound(1)), N: () => inTokens(() => goToFound(-1)) }],
  ["\u2190 \u2192", "one token back, on", { ArrowLeft: () => inTokens(() => step(-1)), ArrowRight: () => inTokens(() => step(1)) }],
  ["f v p", "ask for the next fate, version, probability of tokens", { f: () => inTokens(() => cycle("fate")), v: () => inTokens(() => cycle("version")), p: () => inTokens(() => cycle("level")) }],
  ["/ o r s", "search; outcome; reward; order", { "/": () => byId("filter").focus(), o: () => byId("outcome").focus(), r: () => byId("rewarded").focus(), s: () => byId("order").focus() }],
  ["t + \u2212", "a second of the timeline; zoom in, out", { t: () => askTime(), "+": () => zoomBy(2), "-": () => zoomBy(0.5) }],
  ["d", "dark, light, or as the system", { d: () => nextTheme() }],
  ["?", "these keys", { "?": () => byId("help").showModal() }],
];
const ACTIONS = Object.assign({}, ...KEYS.map(([, , actions]) => actions));
const LEGEND = { fate: "where it goes", version: "weights", level: "probability" };
const THEMES = ["", "light", "dark"];

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const typing = event.target && ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape" || (typing && event.key === "Enter")) {
    if (typing) event.target.blur(); else if (session) closeToList(); else clearFilters();
    return;
  }
  const acts = event.target && ["BUTTON", "SUMMARY"].includes(event.target.tagName);
  if (typing || !ACTIONS[event.key] || (acts && event.key === "Enter")) return;
  ACTIONS[event.key]();
  event.preventDefault();
}

function closeToList() {
  close();
  document.body.dataset.screen = "list";
}

function move(by) {
  if (session) chooseTurn(turnChosen + by); else choose(chosen + by);
}

function moveSession(by) {
  choose(chosen + by);
  if (session) open();
}

function inTokens(act) {
  if (!session || !session.turns.length) return;
  if (tab !== "tokens") showTab("tokens");
  act();
}

// The next chip of a group of the legend; behind the last one, none.
function cycle(kind) {
  const chips = [...document.querySelectorAll(`#legend [aria-label="${LEGEND[kind]}"] button`)];
  const at = chips.findIndex((chip) => chip.getAttribute("aria-pressed") === "true");
  const next = chips[at + 1] || chips[at];
  if (next) next.click();
}

function askTime() {
  if (session && tab !== "timeline") showTab("timeline");
  document.body.dataset.screen = "middle";
  byId("second").focus();
}

function nextTheme() {
  const { dataset } = document.documentElement;
  dataset.theme = THEMES[(THEMES.indexOf(dataset.theme || "") + 1) % THEMES.length];
  remember(() => localStorage.setItem("theme", dataset.theme));
}

// A browser may keep nothing for a page.
function remember(act) {
  try { return act(); } catch { return ""; }
}

for (const id of ["outcome", "rewarded", "role", "weights", "order"]) byId(id).addEventListener("change", () => filter(true));
byId("filter").addEventListener("input", () => filter(true));
byId("lanes").addEventListener("click", askMoment);
byId("second").addEventListener("input", askSecond);
byId("closer").addEventListener("click", () => zoomBy(2));
byId("wider").addEventListener("click", () => zoomBy(0.5));
byId("against").addEventListener("change", () => showTab("compare"));
byId("back").addEventListener("click", closeToList);
byId("about").addEventListener("click", () => { close(); document.body.dataset.screen = "middle"; byId("about").blur(); });
byId("theme").addEventListener("click", nextTheme);
byId("ask-help").addEventListener("click", () => byId("help").showModal());
document.addEventListener("keydown", press);
document.documentElement.dataset.theme = remember(() => localStorage.getItem("theme")) || "";
window.addEventListener("hashchange", follow);
makeTabs();
byId("help").append(make("h2", "", "Keys"), makeFacts(KEYS), makeButton("close", () => byId("help").close()));
offerFilters();
document.body.dataset.screen = "list";
document.body.dataset.tab = tab;
overview();
if (run.live) ask();
else {
  layOutTimeline();
  filter();
  if (!follow() && run.sides > 1) tab = "compare";
}
