// The page of a server while it works: it asks once a second what has changed, and draws that and nothing else. The reader
// stays where he is: what is open, chosen, told, typed and on top of a list stays that, whatever comes above or below it.
const EVERY_MS = 1000;
const PATIENCE_MS = 5000; // without an answer, until that is said
const GIVE_UP_MS = 60000;
const BEFORE = "; below is what there was before";
const known = new Map(); // lines by their ids
const gone = new Set(); // ids of those that the server has no more, in the order in which they left
let version = 0;
let kept = null; // of the session that was opened last: its id, the version that was told of it, and its turns
let isInAHurry = false;
let wake = () => {};
if (run.live) {
  bring = bringLive;
  // A server has no logs and scores, and its page holds one session at a time.
  for (const each of ["log", "score", "compare"]) delete TABS[each];
}

function bringLive(line) {
  if (!kept || kept.id !== line.id) {
    kept = { id: line.id, version: 0, session: { ...ABSENT, turns: [], phase: "being read", missing: "" } };
  }
  isInAHurry = true;
  wake();
  return kept.session;
}

async function ask() {
  for (;;) {
    isInAHurry = false;
    await askOnce(session ? kept : null);
    if (!isInAHurry) await new Promise((resume) => { wake = resume; setTimeout(resume, EVERY_MS); });
  }
}

async function askOnce(wanted) {
  let news;
  const late = setTimeout(() => stand("no answer yet" + BEFORE), PATIENCE_MS);
  const query = new URLSearchParams({
    version, texts: table.length, open: wanted ? wanted.id : "", record: wanted ? wanted.version : 0 });
  try {
    const answer = await fetch("changes?" + query, { signal: AbortSignal.timeout(GIVE_UP_MS), redirect: "error" });
    if (!answer.ok) throw new Error("status " + answer.status);
    news = await answer.json();
  } catch (error) {
    stand("harness view has stopped, or does not answer (" + error.message + ")" + BEFORE);
    return;
  } finally {
    clearTimeout(late);
  }
  try {
    take(news, wanted);
  } catch (error) {
    version = 0; // what was taken by half is requested again
    if (kept) kept.version = 0;
    reportError(error);
  }
}

// How the page stands; nothing while all is well.
function stand(words) {
  words = printable(words);
  if (byId("standing").textContent !== words) byId("standing").textContent = words;
}

function take(news, wanted) {
  for (const row of news.texts) table.push(row);
  if (news.anew) run.bands.length = 0;
  version = news.version;
  run.now = news.now;
  if (news.facts) Object.assign(run, news.facts);
  stand(news.problem ? "the server does not answer: " + news.problem + BEFORE : (run.problems || []).join("; "));
  takeBands(news.bands);
  const isFirst = !run.sessions.length;
  const moved = takeLines(news.sessions, news.anew);
  if (news.facts || news.sessions.length) overview();
  for (const each of run.sessions) if (each.goesOn) moved.add(each);
  if (news.anew || news.bands.length || moved.size || run.bands.some((each) => each.end === null)) {
    if (layOutTimeline()) lanes.drawAnew();
    else for (const at of [...lanes.drawn.keys()]) if (moved.has(shown[at])) lanes.change(at);
    tellMoment();
  }
  if (isFirst && run.sessions.length) follow();
  if (news.session && wanted && wanted === kept && session) takeSession(news.session);
}

function takeBands(bands) {
  for (const band of bands) {
    const at = run.bands.findIndex((each) => each.begin === band.begin && each.words === band.words);
    if (at < 0) run.bands.push(band); else run.bands[at] = band;
  }
  run.bands.sort((one, other) => one.begin - other.begin);
  let over = run.bands.filter((each) => each.end !== null).length - run.most_bands;
  if (over > 0) run.bands = run.bands.filter((each) => each.end === null || over-- <= 0);
}

// Returns the lines of which turns have begun or ended.
function takeLines(lines, anew) {
  const changed = new Set();
  const moved = new Set();
  const before = anew ? new Map(known) : known; // whoever is chosen or open stays the same object
  if (anew) {
    run.sessions.length = 0;
    known.clear();
    gone.clear();
  }
  for (const line of lines) {
    const each = before.get(line.id) || { times: [], created_at: line.created_at, side: 0 };
    const isOther = anew || each.created_at !== line.created_at; // an id may be used again
    const had = isOther ? [] : each.times;
    const byIndex = new Map(line.times.length ? [...had, ...line.times].map((time) => [time[3], time]) : []);
    const times = byIndex.size ? [...byIndex.values()].sort((one, other) => one[0] - other[0]) : had;
    Object.assign(each, line, { times, goesOn: times.some((time) => time[1] === null) });
    if (!known.has(line.id)) {
      known.set(line.id, each);
      run.sessions.push(each);
    }
    gone.delete(line.id);
    if (line.is_gone) gone.add(line.id);
    changed.add(each);
    if (line.times.length || isOther) moved.add(each);
  }
  if (!changed.size && !anew) return moved;
  letGo();
  if (opened) opened = known.get(opened.id) || opened;
  offerFilters();
  filter();
  for (const at of [...sessionRows.drawn.keys()]) if (changed.has(shown[at])) sessionRows.change(at);
  if (session && changed.has(opened)) tellSession();
  return moved;
}

// Of the sessions that are gone the last stay, as on the server of the page.
function letGo() {
  const over = [...gone].slice(0, Math.max(0, gone.size - run.most_gone));
  if (!over.length) return;
  for (const id of over) {
    gone.delete(id);
    known.delete(id);
  }
  run.sessions = run.sessions.filter((each) => known.has(each.id));
}

function takeSession(news) {
  kept.version = news.version;
  const chosenTurn = session.turns[turnChosen];
  const toldTurn = told && session.turns[told.place];
  const top = rows[Math.floor(strip.scroller.scrollTop / ROW_HEIGHT)];
  const topTurn = top && session.turns[top.place];
  const beyondTop = strip.scroller.scrollTop % ROW_HEIGHT;
  const turns = new Map(session.turns.map((turn) => [turn.index, turn]));
  // Of one whose tokens are the same they do not come again.
  for (const turn of news.turns) turns.set(turn.index, { ...turns.get(turn.index), ...turn });
  for (const [index, depth] of news.order) turns.get(index).depth = depth;
  const { phase, ledger, refusals, missing, remarks, metadata } = news;
  const facts = { phase, ledger, refusals, missing, remarks, metadata };
  Object.assign(session, facts, { turns: news.order.map(([index]) => turns.get(index)) });
  const placeOf = (turn) => turn ? session.turns.findIndex((each) => each.index === turn.index) : -1;

  turnChosen = Math.max(0, placeOf(chosenTurn));
  if (rows.length || tab === "tokens") layOutRows();
  const toldPlace = placeOf(toldTurn);
  told = toldPlace < 0 || told.i >= session.turns[toldPlace].tokens.length
    ? null : { place: toldPlace, i: told.i, row: rowOf(toldPlace, told.i) };
  if (tab === "tokens" || isAsked()) find();
  strip.show(rows.length);
  const topPlace = placeOf(topTurn);
  if (topPlace >= 0) {
    const row = top.from < 0 ? session.turns[topPlace].row : rowOf(topPlace, top.from);
    strip.scroller.scrollTop = row * ROW_HEIGHT + beyondTop;
    strip.draw(Infinity);
  }
  tellToken();
  turnRows.show(session.turns.length);
  showConversation();
  tellSession();
  if (sought) seek(sought.turn, sought.position);
}
