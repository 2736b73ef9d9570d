// The Vercel AI SDK against a server: node vercel.mjs URL, in a folder with its packages.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "dllm", baseURL: process.argv[2], includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider("nano");
const prompt = "Reverse this list: Tom, Anna, Ben", answer = "Ben, Anna, Tom";
const common = { model, maxRetries: 0, maxOutputTokens: 96 };

const plain = await generateText({ ...common, prompt });
assert.equal(plain.text, answer);
assert.equal(plain.finishReason, "stop");
assert.ok(plain.usage.inputTokens > 0 && plain.usage.outputTokens > 0);

const streamed = streamText({ ...common, prompt });
let text = "";
for await (const part of streamed.textStream) text += part;
assert.equal(text, answer);
assert.equal((await streamed.usage).outputTokens, plain.usage.outputTokens);

const schema = z.object({ sure: z.boolean(), digit: z.number().int().min(0).max(9) });
const formed = await generateText({ ...common, prompt, output: Output.object({ schema }) });
schema.parse(formed.output);
const partial = streamText({ ...common, prompt, output: Output.object({ schema }) });
for await (const part of partial.partialOutputStream) assert.equal(typeof part, "object");
schema.parse(await partial.output);

const digit = z.number().int().min(0).max(9);
let called = 0;
const add = tool({
  description: "Add two digits.", inputSchema: z.object({ a: digit, b: digit }),
  execute: async ({ a, b }) => { called += 1; return a + b; },
});
const once = await generateText({ ...common, prompt: "What is 4 + 5?", tools: { add }, toolChoice: "required" });
assert.ok(once.toolCalls.length >= 1 && once.toolResults.length === once.toolCalls.length);
const twice = await generateText({
  ...common, prompt: "What is 4 + 5?", tools: { add }, stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});
assert.equal(twice.steps.length, 2);
assert.equal(twice.steps[1].toolCalls.length, 0);
const live = streamText({ ...common, prompt: "What is 4 + 5?", tools: { add }, toolChoice: "required" });
for await (const part of live.fullStream) assert.notEqual(part.type, "error");
assert.ok((await live.toolCalls).length >= 1 && called >= 3);

await assert.rejects(
  generateText({ ...common, prompt: "one two three four five ".repeat(600) }),
  (error) => APICallError.isInstance(error) && error.statusCode === 400 && /prompt is too long/.test(error.message),
);
const halted = new AbortController();
halted.abort();
await assert.rejects(generateText({ ...common, prompt, abortSignal: halted.signal }));
console.log("ok");
