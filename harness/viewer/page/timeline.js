// A lane per session, on one scale of seconds; a bar from the admission of a turn to its end, and what lies between is
// the agent's own time. Behind the lanes stand the bands: what happened to all sessions at once. A moment can be asked for.
const LANE_HEIGHT = 20;
const BARS = 2000; // parts of the scale that a lane shows; turns that lie in one of them are one bar, and so are bands
const AROUND = 0.1; // of the time from the first turn to the last: bands before and behind them, and none of last week
const AHEAD = 0.05; // of what is live the scale reaches so far beyond now, so that it stays the same for a while
const MOMENT_TURNS = 20;
const TICKS = 6;
const MOST_ZOOM = 64;
const BAR_STYLES = { truncated: "truncated", aborted: "aborted", failed: "failed", in_flight: "flying" };
const UNITS = [[7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];
let bands = [];
let begin = Infinity;
let span = 0;
let zoom = 1;
let during = null; // the band that is asked for
const lanes = new Windowed(byId("lanes"), LANE_HEIGHT, makeLane);
const percent = (seconds) => 100 * seconds / span + "%";
const lasted = (began, seconds) => seconds === null ? Math.max(0, run.now - began) : seconds; // a turn in flight has no end yet
const clock = (at) => (at - begin).toFixed(2);
const drawn = make("div", "bands");
const moment = make("div", "moment");
const axis = make("div", "axis");
lanes.space.append(drawn);
byId("lanes").prepend(axis);

// Says whether the scale is another one than before: then every lane has to be redrawn.
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
  drawBands(end);
  drawAxis();
  return begin !== before[0] || span !== before[1];
}

function drawBands(end) {
  const kinds = [...new Set(bands.map((each) => each.kind))];
  byId("keys").replaceChildren(...kinds.map((kind) => {
    const key = makeButton(kind, () => askBand(kind));
    key.className = "chip key " + kind;
    return key;
  }));
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
}

function drawAxis() {
  axis.style.width = lanes.space.style.width = 100 * zoom + "%";
  const [, unit, name] = UNITS.find(([least]) => span >= least);
  const rough = span / unit / TICKS / zoom;
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const scale = make("div", "scale");
  for (let at = 0; at <= span / unit && scale.children.length <= 2 * TICKS * zoom; at += every) {
    const tick = make("span", "tick", Number(at.toPrecision(6)) + " " + name);
    tick.style.left = percent(at * unit);
    scale.append(tick);
  }
  axis.replaceChildren(scale);
}

function zoomBy(factor) {
  const middle = (byId("lanes").scrollLeft + byId("lanes").clientWidth / 2) / zoom;
  zoom = Math.max(1, Math.min(MOST_ZOOM, zoom * factor));
  drawAxis();
  byId("lanes").scrollLeft = middle * zoom - byId("lanes").clientWidth / 2;
}

// A click on a turn goes to it; one beside asks for the second under the mouse.
function askMoment(event) {
  const { session: place, turn } = event.target.dataset;
  if (turn !== undefined) { goTo(shown[place], Number(turn), null, "conversation"); return; }
  const box = drawn.getBoundingClientRect();
  byId("second").value = Math.max(0, span * (event.clientX - box.left) / box.width).toFixed(2);
  askSecond();
}

function askSecond() {
  during = null;
  tellMoment();
}

// The turns during the next band of this kind; from the last one it continues with the first.
function askBand(kind) {
  const alike = bands.filter((each) => each.kind === kind);
  during = alike[(alike.indexOf(during) + 1) % alike.length];
  byId("second").value = Math.max(0, during.begin - begin).toFixed(2);
  tellMoment();
}

function showLanes() {
  lanes.show(shown.length);
  tellMoment();
}

function makeLane(at) {
  const line = shown[at];
  const lane = make("div", at === chosen ? "lane chosen" : "lane");
  const track = make("div", "track");
  let drawnUntil = -1;
  let drawnStatus = null;
  for (const [began, length, status, index] of line.times) {
    const seconds = lasted(began, length);
    if (status === drawnStatus && began + seconds - begin < drawnUntil + span / BARS) continue;
    const bar = make("div", "turn " + (BAR_STYLES[status] || ""));
    bar.style.left = percent(began - begin);
    bar.style.width = percent(seconds);
    bar.title = "turn " + index + ", " + status + ", " + digits(seconds) + " s";
    bar.dataset.session = at;
    bar.dataset.turn = index;
    track.append(bar);
    [drawnUntil, drawnStatus] = [began + seconds - begin, status];
  }
  lane.append(track, make("span", "lane-name", nameOf(line)));
  return lane;
}

// What is asked for: bands over it, turns under way in it, and the last fault before it.
function tellMoment() {
  const words = byId("second").value;
  const second = Number(words);
  moment.hidden = words === "" || !(second >= 0);
  if (moment.hidden) { byId("moment").replaceChildren(); return; }
  moment.style.left = percent(second);
  const from = during ? during.begin : begin + second;
  const to = during && during.end !== null ? during.end : from;
  const isNow = (began, ended) => began <= to && (ended === null || from <= ended);
  const lines = bands.filter((each) => isNow(each.begin, each.end)).map((each) =>
    make("div", "", each.kind + ": " + each.words + ", from second " + clock(each.begin) + " to " + (each.end === null ? "no end" : clock(each.end))));
  const earlier = bands.filter((each) => each.kind === "fault" && each.begin < from).pop();
  if (earlier) lines.push(make("div", "dim", "the fault before: " + earlier.words + ", at second " + clock(earlier.begin)));
  const underWay = shown.flatMap((line) => line.times
    .filter(([began, seconds]) => isNow(began, began + lasted(began, seconds)))
    .map(([, , status, index]) => makeButton("session " + nameOf(line) + " turn " + index + " " + status, () => goTo(line, index, null, "conversation"))));
  const turns = make("div", "turns", underWay.length ? "under way: " : "no turn under way");
  turns.append(...underWay.slice(0, MOMENT_TURNS), underWay.length > MOMENT_TURNS ? " and " + (underWay.length - MOMENT_TURNS) + " more" : "");
  byId("moment").replaceChildren(...lines, turns);
}
