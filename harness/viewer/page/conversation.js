// The conversation of the open session, turn by turn in the order of its tree; reasoning, calls and results fold.
const MORE_CHARACTERS = 200000;
const TURNS_SHOWN = 60;
const FOLDED_CHARACTERS = { tool: 400, system: 300, developer: 300 };
let conversationFrom = 0;
let articles = new Map(); // by turn, with what they show: one that shows the same stays, with what is unfolded in it

function showConversation() {
  const turns = session.turns;
  if (turnChosen < conversationFrom || turnChosen >= conversationFrom + TURNS_SHOWN) {
    conversationFrom = Math.max(0, turnChosen - TURNS_SHOWN / 2);
  }
  const until = Math.min(turns.length, conversationFrom + TURNS_SHOWN);
  const before = articles;
  articles = new Map();
  const parts = turns.slice(conversationFrom, until).map((turn, at) => {
    const place = conversationFrom + at;
    const { tokens, logprobs, matched, row, ...rest } = turn;
    const says = JSON.stringify([opened.id, place, rest]);
    const old = before.get(turn.index);
    const element = old && old.says === says ? old.element : makeArticle(turn, place);
    element.classList.toggle("chosen", place === turnChosen);
    articles.set(turn.index, { says, element });
    return element;
  });
  if (conversationFrom > 0) parts.unshift(makeButton(plural(conversationFrom, "turn") + " before these", () => chooseTurn(conversationFrom - 1)));
  if (until < turns.length) parts.push(makeButton(plural(turns.length - until, "turn") + " after these", () => chooseTurn(until)));
  if (!turns.length) parts.push(make("p", "empty", run.live ? "No turn has ended yet." : "No turn is on record here. The log and the outcome say more."));
  replaceParts(byId("conversation"), parts);
}

// The same elements stay where they are, so that neither focus nor place is lost.
function replaceParts(parent, parts) {
  parts.forEach((part, at) => { if (parent.children[at] !== part) parent.insertBefore(part, parent.children[at] || null); });
  while (parent.children.length > parts.length) parent.lastChild.remove();
}

function revealTurn() {
  if (!session.turns.length) return;
  const { element } = articles.get(session.turns[turnChosen].index);
  element.scrollIntoView({ block: "nearest" });
}

function makeArticle(turn, place) {
  const article = make("article", "depth" + Math.min(turn.depth, 4));
  article.setAttribute("aria-label", "turn " + turn.index);
  article.append(...listOf(turn.messages).map(makeMessage));
  const head = make("div", "who");
  const versions = turn.versions.map((each) => "v" + each.version).join(", ");
  head.append(makeButton("turn " + turn.index, () => chooseTurn(place)), make("span", "", [
    "assistant", turn.sampled + " tokens", digits(turn.seconds) + " s", versions, turn.attempts > 1 && turn.attempts + " attempts",
  ].filter(Boolean).join(" \u00b7 ")));
  if (turn.role !== "main") head.append(make("span", "badge role", turn.role + (turn.evidence ? ": " + turn.evidence : "")));
  if (turn.depth) head.append(make("span", "badge", turn.parent === null ? "new root" : "continues turn " + turn.parent));
  if (turn.status !== "completed") head.append(make("span", "badge bad", turn.status + " by " + turn.end));
  if (!isTrained(turn.fate)) head.append(make("span", "badge bad", "dropped: " + turn.fate));
  const said = make("div", "message assistant");
  said.append(head, ...makeReply(turn));
  article.append(said);
  return article;
}

function makeReply(turn) {
  const reply = Object(turn.reply);
  const parts = [];
  const reasoning = reply.reasoning_content;
  if (reasoning) parts.push(makeFold("thinking (" + plural(String(reasoning).length, "character") + ")", String(reasoning)));
  const content = textOf(reply.content);
  if (content) parts.push(...makeWords(content));
  parts.push(...makeCalls(reply));
  if (!parts.length && turn.tokens && turn.status !== "completed") {
    parts.push(...makeWords([...tokensOf(turn).slice(turn.context)].map((number) => table[number][1] || "").join("") + " [cut]"));
  }
  if (turn.error) parts.push(make("pre", "words error", turn.error));
  return parts;
}

function makeMessage(message) {
  const role = message.role;
  const text = textOf(message.content);
  const block = make("div", "message " + (["user", "system", "tool", "assistant"].includes(role) ? role : "other"));
  const limit = FOLDED_CHARACTERS[role];
  if (limit && text.length > limit) block.append(makeFold(role + " (" + plural(text.length, "character") + "): " + text.slice(0, 80), text));
  else block.append(make("div", "who", role), ...makeWords(text));
  block.append(...makeCalls(message));
  return block;
}

function makeCalls(message) {
  return listOf(message.tool_calls).map((call) => {
    const { name, arguments: given } = Object(call.function);
    const words = textOf(given);
    return makeFold(name + "(" + words.slice(0, 120) + (words.length > 120 ? "\u2026" : "") + ")", words, "call");
  });
}

// Agents send what they like: whatever is no list of objects has no parts.
const listOf = (value) => (Array.isArray(value) ? value : []).map(Object);

// Content may be text, parts with text, or something else.
function textOf(content) {
  if (typeof content === "string") return content;
  if (Array.isArray(content) && content.every((part) => part && typeof part.text === "string")) return content.map((part) => part.text).join("\n");
  return content === null || content === undefined ? "" : JSON.stringify(content);
}

// A block that is filled when it is unfolded for the first time.
function makeFold(summary, text, kind) {
  const fold = make("details", kind || "");
  fold.append(make("summary", "", summary));
  fold.addEventListener("toggle", () => { if (fold.open && fold.children.length === 1) fold.append(...makeWords(text)); });
  return fold;
}

function makeWords(words) {
  const block = make("pre", "words", words.slice(0, WORDS_CHARACTERS));
  const parts = [block];
  let until = WORDS_CHARACTERS;
  if (words.length > until) {
    const more = makeButton("", () => {
      block.append(printable(words.slice(until, until + MORE_CHARACTERS), true));
      until += MORE_CHARACTERS;
      tellMore();
    });
    const tellMore = () => { more.textContent = "more of the " + words.length + " characters"; more.hidden = until >= words.length; };
    tellMore();
    parts.push(more);
  }
  return parts;
}
