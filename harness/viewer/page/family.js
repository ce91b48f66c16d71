// The lives and forks that begin with one record, as a tree with links, and how each left that record.
const MOST_KIN = 200;
const KIN_INDENT = 16;

function tellFamily(line) {
  const known = [...run.sessions, ...run.superseded].filter((each) => each.side === line.side);
  const byIds = new Map(known.map((each) => [each.id, each]));
  const heirs = Map.groupBy(known.filter((each) => each.inherits), (each) => each.inherits);
  const above = new Set([line]);
  let first = line;
  for (let next = byIds.get(first.inherits); next && !above.has(next); next = byIds.get(first.inherits)) above.add(first = next);
  const list = make("div");
  list.setAttribute("role", "list");
  (function walk(each, depth) {
    if (list.children.length === MOST_KIN) return;
    list.append(makeKin(each, depth));
    for (const heir of heirs.get(each.id) || []) walk(heir, depth + 1);
  })(first, 0);
  const family = byId("family");
  family.hidden = list.children.length < 2 && !line.inherits;
  family.replaceChildren(make("summary", "", "family of " + plural(list.children.length, "session") + kinOf(line) + (line.inherits ? " from " + line.inherits.slice(0, 8) : "") + reasonOf(line)), list);
}

const kinOf = (line) => !line.inherits ? "" : line.forked_at === null ? ", continues" : ", forks turn " + line.forked_at;
const leftOf = (line) => line === opened ? session.left : line.left;
const reasonOf = (line) => leftOf(line) ? ", until " + leftOf(line) : "";

function makeKin(line, depth) {
  const row = make("div", "line");
  row.setAttribute("role", "listitem");
  row.style.paddingLeft = KIN_INDENT * Math.min(depth, 8) + "px";
  const name = (line.number === null ? "" : line.number + " \u00b7 ") + (line.id || "none").slice(0, 8);
  const isHere = line !== opened && run.sessions.includes(line);
  const reward = line.reward === null ? "" : ", reward " + digits(line.reward);
  row.append(make("i", "standing " + standingOf(line)), isHere ? makeButton(name, () => goTo(line, null, null)) : make("b", "", name),
    make("span", "", (line === opened ? "this one, " : "") + outcomeOf(line) + reward + kinOf(line) + reasonOf(line)));
  row.title = printable(row.textContent);
  return row;
}
