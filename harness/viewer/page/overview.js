// What a reader wants to know of a run first: its verdict, where to look, its training steps, and its facts.
const CURVES = /reward|length|tokens|kl|stale|lag|dropped|loss|entropy|clip|audit/i;
const MOST_CURVES = 12;
const CURVE = { width: 240, height: 72 };
const ALIKE = 3; // findings of one kind

function overview() {
  const name = run.suite || (run.live ? run.source : "a store");
  document.title = printable(name) + " \u00b7 harness view";
  byId("title").textContent = printable(name);
  const rewards = run.sessions.map((line) => line.reward).filter((reward) => typeof reward === "number");
  byId("verdict").textContent = printable([
    run.status, plural(run.sessions.length, "session"), rewards.length && "reward " + digits(mean(rewards)),
  ].filter(Boolean).join(" \u00b7 "));
  const facts = byId("facts");
  facts.replaceChildren(...run.said.map((sentence) => make("div", "dim", sentence)));
  for (const sentence of run.missing) facts.append(make("div", "warning", "missing: " + sentence));
  if (!run.sessions.length) facts.append(make("p", "empty", run.live ? "No session yet: they appear here as agents create them." : "No session is on record here."));
  const look = findings();
  const says = JSON.stringify(look);
  if (byId("look-first").dataset.says === says) return; // what is live is told again and again
  byId("look-first").dataset.says = says;
  byId("look-first").replaceChildren(...look.map(([title, words, go]) => {
    const item = make("div");
    item.setAttribute("role", "listitem");
    const button = makeButton(title, go);
    button.append(make("span", "dim", words.slice(0, CELL_CHARACTERS)));
    item.append(button);
    return item;
  }));
  drawCurves();
}

// Places to look at first, each as a title, words and a way to go there.
function findings() {
  const found = [];
  const pairs = run.sessions.filter((line) => line.side === 0 && line.partner !== undefined);
  for (const line of pairs.slice(0, ALIKE)) {
    found.push(["Compare " + nameOf(line) + " with " + nameOf(run.sessions[line.partner]), "the first token where they differ", () => goTo(line, null, null, "compare")]);
  }
  const bad = run.sessions.filter((line) => ["failed", "aborted"].includes(standingOf(line)) && line.outcome !== "gone");
  for (const line of bad.slice(0, ALIKE)) {
    found.push(["Session " + nameOf(line) + " " + outcomeOf(line), line.why || "", () => goTo(line, null, null, line.log ? "log" : "conversation")]);
  }
  const zeros = run.sessions.filter((line) => line.reward !== null && line.reward <= 0);
  for (const line of zeros.slice(0, ALIKE)) found.push(["Session " + nameOf(line) + " reward " + digits(line.reward), line.reason, () => goTo(line, null, null, "score")]);
  const prompts = Map.groupBy(run.sessions.filter((line) => promptOf(line) && typeof line.reward === "number"), promptOf);
  if (prompts.size > 1) {
    const [prompt, lines] = [...prompts].sort(([, one], [, other]) => worth(one) - worth(other))[0];
    found.push(["Worst prompt: " + prompt, "mean reward " + digits(worth(lines)), () => goTo([...lines].sort(SORTS.worst)[0], null, null, "conversation")]);
  }
  const slow = [...run.sessions].sort(SORTS.slowest)[0];
  if (slow && secondsOf(slow) > 0) {
    const time = slow.times.find((each) => each[1] === secondsOf(slow));
    found.push(["Slowest turn: session " + nameOf(slow) + " turn " + time[3], digits(time[1]) + " s", () => goTo(slow, time[3], null, "conversation")]);
  }
  for (const role of ["stray", "rejected"]) {
    const line = run.sessions.find((each) => (each.roles || []).includes(role));
    if (line) found.push(["Calls of role " + role, "session " + nameOf(line), () => { goTo(line, null, null, "tree"); chooseTurn(session.turns.findIndex((turn) => turn.role === role)); }]);
  }
  for (const fate of new Set(run.sessions.flatMap((line) => Object.keys(line.fates || {})))) {
    if (isTrained(fate)) continue;
    const lines = run.sessions.filter((line) => (line.fates || {})[fate]);
    const count = lines.reduce((sum, line) => sum + line.fates[fate], 0);
    found.push(["Dropped tokens: " + fate, plural(count, "token"), () => { goTo(lines[0], null, null, "tokens"); askFor("fate", fate); }]);
  }
  return found;
}

// A curve for each figure of the training steps, one line for each run; then those of the audits, what stays unexplained
// as the second line.
function drawCurves() {
  const names = new Set(run.steps.flatMap((steps) => steps.flatMap(Object.keys)).filter((name) => CURVES.test(name)));
  const curves = [...names].slice(0, MOST_CURVES).map((name) => makeCurve(name, run.steps.map((steps) => steps.map((step) => step[name]))));
  for (const groups of run.audits) {
    for (const [name, rows] of Object.entries(groups)) curves.push(makeCurve("audit: gap by " + name, [rows.map((row) => row.gap), rows.map((row) => row.left)], name));
  }
  byId("curves").replaceChildren(...curves);
}

function makeCurve(name, columns, unit = "step") {
  const values = columns.flat().filter((value) => typeof value === "number");
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const last = columns.map((each) => each.filter((value) => typeof value === "number").at(-1)).filter((value) => value !== undefined);
  const figure = make("figure");
  figure.setAttribute("role", "listitem");
  const svg = draw("svg", { viewBox: "0 0 " + CURVE.width + " " + CURVE.height, role: "img", "aria-label": name + ", last " + last.map(digits).join(" and ") });
  columns.forEach((column, side) => {
    const points = column.map((value, step) => typeof value !== "number" ? "" : [
      CURVE.width * step / Math.max(1, column.length - 1),
      2 + (CURVE.height - 4) * (1 - (value - least) / (most - least || 1)),
    ].map((each) => each.toFixed(1)).join(",")).filter(Boolean);
    svg.append(draw("polyline", { points: points.length > 1 ? points.join(" ") : points + " " + CURVE.width + "," + CURVE.height / 2, class: "side" + side }));
  });
  figure.title = printable(name);
  const caption = make("figcaption");
  caption.append(make("span", "", name), make("b", "", last.map(digits).join(" and ")));
  figure.append(caption, svg, make("small", "dim", digits(least) + " to " + digits(most) + ", " + plural(Math.max(...columns.map((each) => each.length)), unit)));
  return figure;
}

function draw(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
