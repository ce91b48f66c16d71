// The open session: its end, its views as tabs, its turns as a tree, and the address of what is on screen.
const TURN_HEIGHT = 24;
const TABS = {
  conversation: ["Conversation", () => showConversation()],
  tokens: ["Tokens", () => showTokens()],
  tree: ["Tree", () => turnRows.reveal(turnChosen)],
  timeline: ["Timeline", () => lanes.reveal(chosen)],
  log: ["Log", () => showLog()],
  score: ["Score", () => showScore()],
  raw: ["Raw", () => showRaw()],
  compare: ["Compare", () => showComparison()],
};
const MOST_OFFERED = 500;
let session = null;
let opened = null; // its line
let turnChosen = 0;
let tab = "conversation";
let sought = null; // a turn and token of a link that are not here yet
const turnRows = new Windowed(byId("turns"), TURN_HEIGHT, (at) => {
  const turn = session.turns[at];
  const values = ["  ".repeat(Math.min(turn.depth, 20)) + (turn.depth ? "+ " : "") + turn.index, turn.role, turn.status + " by " + turn.end,
    turn.versions.map((each) => each.version).join(", "), turn.prompt, turn.sampled, turn.seconds.toFixed(2),
    [counts(turn.fates), turn.unknown && "at most " + turn.unknown + " unknown", turn.role !== "main" && turn.evidence].filter(Boolean).join("; ")];
  return makeRow(values, at === turnChosen, () => chooseTurn(at));
});

const ABSENT = { turns: [], kin: [], left: "", ledger: null, phase: "not here", refusals: {}, remarks: [], metadata: {} };
// The session of a line; the live page has another way.
let bring = (line) => line.element === null ? { ...ABSENT } : read(line.element);

function open() {
  const line = shown[chosen];
  if (!line) { close(); return; }
  opened = line;
  session = bring(line);
  turnChosen = 0;
  sought = null;
  document.body.dataset.screen = "middle";
  byId("session").hidden = false;
  offerPartners();
  tellSession();
  turnRows.show(session.turns.length);
  forgetTokens();
  conversationFrom = 0;
  byId("conversation").scrollTop = 0;
  showTab(tab === "compare" && line.partner === undefined ? "conversation" : tab);
}

function close() {
  session = opened = told = null;
  byId("session").hidden = true;
  byId("token").replaceChildren();
  byId("ending").replaceChildren();
  address();
}

// Open a session at a turn and a token of it, in a view; the filters give way.
function goTo(line, turn, position, view) {
  if (!shown.includes(line)) clearFilters();
  choose(shown.indexOf(line));
  if (view) tab = view;
  open();
  if (turn !== null) seek(turn, position);
}

function seek(turn, position) {
  const place = session.turns.findIndex((each) => each.index === turn);
  sought = place < 0 ? { turn, position } : null;
  if (place < 0) return;
  chooseTurn(place);
  if (position === null) return;
  showTab("tokens");
  tell(place, position + session.turns[place].context, true);
}

function showTab(name) {
  tab = name;
  document.body.dataset.tab = name;
  for (const each of byId("tabs").children) {
    each.setAttribute("aria-selected", String(each.dataset.name === name));
    each.tabIndex = each.dataset.name === name ? 0 : -1;
  }
  TABS[name][1]();
  address();
}

function makeTabs() {
  byId("tabs").replaceChildren(...Object.entries(TABS).map(([name, [words]]) => {
    const button = makeButton(words, () => showTab(name));
    button.setAttribute("role", "tab");
    button.dataset.name = name;
    return button;
  }));
}

function tellSession() {
  const line = opened;
  byId("name").replaceChildren(make("i", "standing " + standingOf(line)), printable("session " + nameOf(line) + " \u00b7 " + outcomeOf(line)));
  byId("sums").textContent = printable([line.reward !== null && "reward " + digits(line.reward), line.turns !== null && plural(line.turns, "turn"),
    line.sampled !== null && plural(line.sampled, "token")].filter(Boolean).join(" \u00b7 "));
  const why = [line.cause && "by the " + line.cause, line.why, line.reason, session.missing];
  byId("why").textContent = printable(why.filter(Boolean).join("; ").slice(0, WORDS_CHARACTERS));
  tellFamily(line);
  byId("ending").replaceChildren(make("h2", "", "session " + nameOf(line)), makeFacts([
    ["id", line.id || "no session"], ...session.kin, ["phase", session.phase], [standingOf(line) === "going" ? "state" : "outcome", line.outcome], ["reward", line.reward], ["reason", line.reason],
    ["ledger", session.ledger], ["refused", counts(session.refusals) || "nothing"], ["remarks", (session.remarks || []).join("; ")], ["log", line.log],
  ]), makeCopy("copy link", () => location.href));
}

function chooseTurn(at) {
  const before = turnChosen;
  turnChosen = Math.max(0, Math.min(session.turns.length - 1, at));
  turnRows.change(before);
  turnRows.change(turnChosen);
  turnRows.reveal(turnChosen);
  if (tab === "conversation") { showConversation(); revealTurn(); }
  if (tab === "tokens") showTokensOf(turnChosen);
  if (tab === "raw") showRaw();
  address();
}

// The address of what is on screen: #session/turn/token.
function address() {
  let hash = " ";
  if (session) {
    hash = "#" + keyOf(opened);
    const turn = session.turns[told ? told.place : turnChosen];
    if (turn) hash += "/" + turn.index;
    if (told) hash += "/" + (told.i - turn.context);
  }
  if (hash !== location.hash) history.replaceState(null, "", hash.trim() || location.pathname);
}

// Go where the address says. Returns whether its session is here.
function follow() {
  let address = "";
  try {
    address = decodeURIComponent(location.hash);
  } catch {
    return false; // no address of this page
  }
  const [, key, turn, position] = address.match(/^#([^/]+)(?:\/(\d+))?(?:\/(-?\d+))?$/) || [];
  const line = key && run.sessions.find((each) => keyOf(each) === key || (key.length > 7 && keyOf(each).startsWith(key)));
  if (line) goTo(line, turn === undefined ? null : Number(turn), position === undefined ? null : Number(position), null);
  return Boolean(line);
}

function showLog() {
  const element = byId("log" + run.sessions.indexOf(opened));
  byId("log").replaceChildren(make("div", "dim", opened.log || "no log is on record"), ...(element ? makeWords(JSON.parse(element.textContent)) : []));
  byId("log").scrollTop = byId("log").scrollHeight;
}

function showScore() {
  const others = run.sessions.filter((line) => line.side === opened.side && promptOf(line) && promptOf(line) === promptOf(opened));
  const rewards = others.map((line) => line.reward).filter((reward) => typeof reward === "number");
  const none = opened.reward === null ? "none: " + (opened.reason || opened.why || "no check has scored it") : opened.reward;
  byId("score").replaceChildren(
    makeFacts([["reward", none], ["reason", opened.reason], ...Object.entries(opened.figures || {}).filter(([name]) => name !== "reason")
      .map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : value])]),
    ...(rewards.length ? [make("h2", "", promptOf(opened)), makeFacts([["samples", others.length], ["mean reward", digits(mean(rewards))],
      ["best", digits(Math.max(...rewards))], ["worst", digits(Math.min(...rewards))]])] : []));
}

function makeCopy(words, textOf) {
  const button = makeButton(words, async () => {
    try {
      await navigator.clipboard.writeText(textOf());
      button.textContent = "copied";
    } catch {
      button.textContent = "this browser does not let pages copy";
    }
    setTimeout(() => { button.textContent = words; }, 2000);
  });
  return button;
}
