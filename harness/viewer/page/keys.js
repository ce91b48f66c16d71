// Everything that the page does is done by a key; a mouse does some of it too.
const FIELDS = { "/": "filter", o: "outcome", t: "second" };
const TOKEN_FIELDS = { v: "version", f: "fate" };

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target && ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape" || (typing && event.key === "Enter")) {
    if (typing) event.target.blur(); else close();
    return;
  }
  if (typing) return;
  const field = FIELDS[event.key] || (session && TOKEN_FIELDS[event.key]);
  const by = { j: 1, k: -1, J: 1, K: -1, n: 1, N: -1, ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (field) byId(field).focus();
  else if (event.key === "Enter" && event.target === document.body) open();
  else if (event.key === "c" && session) nextColor();
  else if (by && "jkJK".includes(event.key) && (!session || "JK".includes(event.key))) {
    choose(chosen + by);
    if (session) open();
  } else if (by && session && session.turns.length) {
    if ("jk".includes(event.key)) chooseTurn(turnChosen + by);
    else if ("nN".includes(event.key)) goToFound(by);
    else step(by);
  } else return;
  event.preventDefault();
}

byId("filter").addEventListener("input", filter);
byId("outcome").addEventListener("change", filter);
byId("lanes").addEventListener("click", askMoment);
byId("second").addEventListener("input", tellMoment);
byId("version").addEventListener("change", tellFound);
byId("fate").addEventListener("change", tellFound);
byId("color").addEventListener("click", nextColor);
byId("strip").addEventListener("mouseover", point);
document.addEventListener("keydown", press);
if (run.live) ask();
else {
  overview();
  offerOutcomes();
  layOutTimeline();
  filter();
}
