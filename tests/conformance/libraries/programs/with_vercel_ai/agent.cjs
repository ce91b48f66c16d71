// The conversation of conversation.py with the AI SDK of Vercel.
"use strict";
const { createRequire } = require("node:module");

const programs = process.env.PATH.split(":").find((folder) => folder.endsWith("node_modules/.bin"));
const installed = createRequire(`${programs}/`);
const { generateText, stepCountIs, streamText, tool } = installed("ai");
const { createAnthropic } = installed("@ai-sdk/anthropic");
const { createOpenAI } = installed("@ai-sdk/openai");
const { createOpenAICompatible } = installed("@ai-sdk/openai-compatible");
const { z } = installed("zod");

const QUESTIONS = ["Please note what the two sums are.", "Is it noted?"];
const MODEL = "scripted";

const place = z.object({ name: z.string(), at: z.array(z.number()), depth: z.number().int() });
const tools = {
  look: tool({ description: "Read all notes.", inputSchema: z.object({}), execute: () => "There is a note." }),
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: ({ a, b }) => a + b,
  }),
  note: tool({
    description: "Write a note at a place.",
    inputSchema: z.object({ text: z.string(), place }),
    execute: ({ place: { name } }) => `Noted at ${name}.`,
  }),
};

function modelOf({ dialect, env }) {
  if (dialect === "anthropic_messages") {
    return createAnthropic({ baseURL: `${env.ANTHROPIC_BASE_URL}/v1`, apiKey: env.ANTHROPIC_API_KEY })(MODEL);
  }
  const options = { baseURL: env.OPENAI_BASE_URL, apiKey: env.OPENAI_API_KEY };
  if (dialect === "openai_responses") {
    return createOpenAI(options)(MODEL);
  }
  return createOpenAICompatible({ name: "server", ...options })(MODEL);
}

async function converse(conversation) {
  const messages = [];
  const answers = [];
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content });
    const asked = { model: modelOf(conversation), messages, tools, stopWhen: stepCountIs(10), maxOutputTokens: 1000 };
    const result = conversation.streams ? streamText(asked) : await generateText(asked);
    answers.push(await result.text);
    messages.push(...(await result.responseMessages));
  }
  return answers;
}

async function main() {
  for (const conversation of JSON.parse(process.env.CONVERSATIONS)) {
    let told;
    try {
      told = await converse(conversation);
    } catch (error) {
      told = [String(error.stack)];
    }
    console.log(JSON.stringify(told));
  }
}

main();
