// The request of a turn, to read and to copy: as a command, as JSON, and the session as a script of the scripted engine.
const FIELDS = { max_new_tokens: "max_tokens", min_new_tokens: "min_tokens" };

// The request as Chat Completions takes it, whatever API the client used.
function requestOf(turn) {
  const byIndex = new Map(session.turns.map((each) => [each.index, each]));
  const messages = [];
  let root = turn;
  for (let each = turn, reply = []; each; each = byIndex.get(each.parent)) {
    messages.unshift(...listOf(each.messages), ...reply);
    reply = byIndex.has(each.parent) ? [byIndex.get(each.parent).reply] : [];
    root = each;
  }
  const { json_schema: schema, top_logprobs: top, ...rest } = turn.asked;
  const request = { model: "default", messages };
  const alike = session.turns.find((each) => each.toolset === root.toolset && each.tools.length);
  if (alike) request.tools = alike.tools;
  for (const [name, value] of Object.entries(rest)) request[FIELDS[name] || name] = value;
  if (schema) request.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  if (top) Object.assign(request, { logprobs: true, top_logprobs: top });
  return JSON.stringify(request, null, 2);
}

const curlOf = (request) => "curl \"$OPENAI_BASE_URL/chat/completions\" -H \"Authorization: Bearer $OPENAI_API_KEY\" -H 'Content-Type: application/json' --data '" +
  request.replaceAll("'", "'\\''") + "'";

// The answers of the session, in order of admission: a scripted engine says them again. It takes ids where a text is not
// on record, and adds the end of a turn itself.
function scriptOf() {
  return [...session.turns].sort((one, other) => one.index - other.index).map((turn) => {
    const isWhole = turn.status === "completed";
    const outputs = [...tokensOf(turn).subarray(turn.context)].map((number) => table[number]);
    const texts = outputs.map(([, text]) => text);
    const said = texts.includes(null) ? "tokens = " + JSON.stringify(outputs.map(([id]) => id))
      : "text = " + JSON.stringify(texts.slice(0, isWhole ? -1 : undefined).join("")).replaceAll("\x7f", "\\u007f");
    return "[[steps]]\n" + said + "\nfinish = \"" + (isWhole ? "stop" : "length") + "\"\n";
  }).join("\n");
}

function showRaw() {
  const turn = session.turns[turnChosen];
  if (!turn) { byId("raw").replaceChildren(make("p", "empty", "No turn is on record here.")); return; }
  const { tokens, logprobs, matched, messages, tools, ...facts } = turn;
  const request = requestOf(turn);
  byId("raw").replaceChildren(
    makeCopy("copy as curl", () => curlOf(request)), makeCopy("copy as JSON", () => request), makeCopy("copy as test input", scriptOf), makeCopy("copy link", () => location.href),
    make("h2", "", "request of turn " + turn.index), ...makeWords(request), make("h2", "", "its outcome"), ...makeWords(JSON.stringify(facts, null, 2)),
    make("h2", "", "metadata of the session"), ...makeWords(JSON.stringify(session.metadata || {}, null, 2)));
}
