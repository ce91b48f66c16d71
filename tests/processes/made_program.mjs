// The same for Node.
const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "content-type": "application/json" },
  body: JSON.stringify({ model: "m", messages: [{ role: "user", content: "Say what is easily rewarded." }] }),
});
await answer.text();
