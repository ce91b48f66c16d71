// A lane per session, on one scale of seconds; a bar from the admission of a turn to its end, and what lies between is
// the agent's own time. Behind the lanes stand the bands: what happened to all sessions at once. A moment can be asked for.
const LANE_HEIGHT = 14;
const BARS = 2000; // parts of the scale that a lane shows; turns that lie in one of them are one bar, and so are bands
const AROUND = 0.1; // of the time from the first turn to the last: bands before and behind them, and none of last week
const AHEAD = 0.05; // of what is live the scale reaches so far beyond now, so that it stays the same for a while
const MOMENT_TURNS = 20;
const BAR_STYLES = { truncated: "truncated", aborted: "aborted", failed: "failed", in_flight: "flying" };
let bands = [];
let begin = Infinity;
let span = 0;
const lanes = new Windowed(byId("lanes"), LANE_HEIGHT, makeLane);
const percent = (seconds) => 100 * seconds / span + "%";
const lasted = (began, seconds) => seconds === null ? Math.max(0, run.now - began) : seconds; // a turn in flight has no end yet
const drawn = make("div", "bands");
const moment = make("div", "moment");
lanes.space.append(drawn);

// Says whether the scale is another one than before: then every lane has to be drawn anew.
function layOutTimeline() {
  const before = [begin, span];
  let end = -Infinity;
  begin = Infinity;
  const take = (at, until) => { begin = Math.min(begin, at); end = Math.max(end, until); };
  for (const each of run.sessions) for (const [at, seconds] of each.times) take(at, at + lasted(at, seconds));
  // Of what is live the end moves, and the beginning must not.
  const around = AROUND * (end - begin);
  const [from, until] = end < begin ? [-Infinity, Infinity] : run.live ? [begin, Infinity] : [begin - around, end + around];
  bands = run.bands.filter((each) => each.begin <= until && (each.end === null || each.end >= from));
  const goesOn = run.live ? run.now : -Infinity;
  for (const band of bands) take(Math.max(from, band.begin), Math.min(until, band.end === null ? Math.max(band.begin, goesOn) : band.end));
  if (end < begin) { begin = 0; end = 0; }
  const length = Math.max(end - begin, 1e-9);
  const stillFits = length <= span && span < length * (1 + 2 * AHEAD);
  if (!run.live) span = length; else if (!stillFits) span = length * (1 + AHEAD);
  byId("span").textContent = end > begin ? length.toFixed(2) + " s" : "no turns";
  for (const kind of new Set(bands.map((each) => each.kind))) byId("span").append(" ", make("span", "key " + kind, kind));
  drawn.replaceChildren();
  const drawnUntil = {};
  for (const band of bands) {
    const until = band.end === null ? end : band.end;
    if (until < drawnUntil[band.kind] + span / BARS) continue;
    const element = make("div", "band " + band.kind);
    element.style.left = percent(band.begin - begin);
    element.style.width = percent(until - band.begin);
    drawn.append(element);
    drawnUntil[band.kind] = until;
  }
  drawn.append(moment);
  return begin !== before[0] || span !== before[1];
}

// The second under the mouse.
function askMoment(event) {
  const box = lanes.space.getBoundingClientRect();
  byId("second").value = Math.max(0, span * (event.clientX - box.left) / box.width).toFixed(2);
  tellMoment();
}

function showLanes() {
  lanes.show(shown.length);
  tellMoment();
}

function makeLane(at) {
  const lane = make("div", at === chosen ? "lane chosen" : "lane");
  let drawnUntil = -1;
  let drawnStatus = null;
  for (const [began, length, status] of shown[at].times) {
    const seconds = lasted(began, length);
    if (status === drawnStatus && began + seconds - begin < drawnUntil + span / BARS) continue;
    const bar = make("div", "turn " + (BAR_STYLES[status] || ""));
    bar.style.left = percent(began - begin);
    bar.style.width = percent(seconds);
    lane.append(bar);
    [drawnUntil, drawnStatus] = [began + seconds - begin, status];
  }
  lane.addEventListener("click", () => choose(at));
  return lane;
}

// The second that stands in the field: bands over it, turns under way in it, and the last fault before it.
function tellMoment() {
  const asked = byId("second").value;
  const second = Number(asked);
  moment.hidden = asked === "" || !(second >= 0);
  if (moment.hidden) { byId("moment").replaceChildren(); return; }
  moment.style.left = percent(second);
  const now = begin + second;
  const isNow = (from, until) => from <= now && (until === null || now <= until);
  const clock = (at) => (at - begin).toFixed(2);
  const lines = bands.filter((each) => isNow(each.begin, each.end)).map((each) =>
    make("div", "", each.kind + ": " + each.words + ", from second " + clock(each.begin) + " to " + (each.end === null ? "no end" : clock(each.end))));
  const earlier = bands.filter((each) => each.kind === "fault" && each.begin < now).pop();
  if (earlier) lines.push(make("div", "dim", "the fault before: " + earlier.words + ", at second " + clock(earlier.begin)));
  const underWay = [];
  for (const each of shown) {
    for (const [began, seconds, status, index] of each.times) {
      if (isNow(began, began + lasted(began, seconds))) underWay.push((each.number === null ? (each.id || "").slice(0, 8) : each.number) + " turn " + index + " " + status);
    }
  }
  const rest = underWay.length > MOMENT_TURNS ? " and " + (underWay.length - MOMENT_TURNS) + " more" : "";
  lines.push(make("div", "", underWay.length ? "under way: session " + underWay.slice(0, MOMENT_TURNS).join(", session ") + rest : "no turn under way"));
  byId("moment").replaceChildren(...lines);
}
