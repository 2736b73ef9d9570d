/* A chat whose every answer is decoded by one method or two; each step of a stream is added to the trace shown. */
const field = (id) => $(id).value.trim();
const methods = [...document.querySelectorAll(".method")];
let running = null, turns = [], asked = "";  // turns: the messages before `asked`, the message that is being answered

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (field("key")) headers.Authorization = `Bearer ${field("key")}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answers ${response.status}`);
  }
  return response;
}

function trouble(text) { $("trouble").textContent = text; $("trouble").hidden = !text; }

async function setUp() {
  try {
    const { data: [model] } = await (await call("v1/models")).json();
    $("model").textContent = model.id;
    for (const select of document.querySelectorAll("select.cache")) {
      if (select.options.length) continue;
      select.replaceChildren(...model.dllm.caches.map((name) => new Option(name)));
    }
    const known = [model.dllm.sampler, "threshold(tau=0.9)", "llada(steps=32)", "localleap", "factor", "dparallel",
      "eb", "prophet+llada", "adablock+threshold", "lopa(threshold)"];
    $("samplers").replaceChildren(...[...new Set(known)].map((name) => new Option(name)));
    trouble("");
  } catch (error) { trouble(error.message); }
}

function request(method) {
  const body = {
    messages: [...turns, { role: "user", content: asked }], stream: true, trace: true, return_token_ids: true,
    stream_options: { include_drafts: true, include_usage: true },
    sampler: method.querySelector(".sampler").value.trim() || undefined,
    cache: method.querySelector(".cache").value || undefined,
  };
  for (const id of ["max_tokens", "block_length", "temperature", "seed"]) if (field(id)) body[id] = Number(field(id));
  if (field("length")) body.length = field("length");
  return body;
}

/* Server-sent events of a response, as objects. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

const named = ({ sampler, length, cache }) => ({ sampler: [sampler, length].filter(Boolean).join("+"), cache: cache ?? "" });

/* The trace of a canvas on which nothing is written yet. */
function blank(frame, body) {
  const before = frame.given.filter(([at]) => at < 0), pieces = {}, prompt = [];
  for (const [, text] of before) { pieces[-1 - prompt.length] = text; prompt.push(-1 - prompt.length); }
  const length = prompt.length + frame.length;
  return { prompt, length, region: [prompt.length, length], given: [[0, prompt.length]], final: [], steps: [], pieces,
    ...named(body), model: field("key") ? "" : $("model").textContent };
}

function step(t, frame) {
  const base = t.prompt.length, at = (i) => i + base;
  const computed = frame.computed - (t.computed ?? 0);
  t.computed = frame.computed;
  for (const entry of [...frame.commit, ...frame.draft]) t.pieces[entry[entry.length - 1]] = entry[1];
  return {
    step: frame.step, window: frame.window.map(at), remasked: frame.remask.map(at), computed,
    commits: frame.commit.map(([i, , p, id]) => [at(i), id, Math.log(Math.max(p, 1e-9))]),
    drafts: frame.draft.map(([i, , id]) => [at(i), id]), live: true,
    edits: (frame.edits ?? []).map(([i, ...rest]) => [at(i), ...rest]),
    compute: [], read: [], refresh: false, forced: false, candidates: [],
  };
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function write(index, method, signal) {
  const body = request(method), answer = $("answers").children[index];
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const frame = event.dllm;
    if (frame?.type === "canvas") begin(index, blank(frame, body));
    else if (frame?.type === "step") {
      const follow = Number(slider.value) >= longest;  // not while one looks back
      views[index].add(step(views[index].t, frame));
      measure();
      set(follow ? longest : Number(slider.value));
      if (Number(field("pause"))) await pause(Number(field("pause")));
    } else if (event.usage) {
      answer.querySelector("small").textContent = `${event.usage.completion_tokens} tokens · ${frame.forwards} forward${frame.forwards === 1 ? "" : "s"} · ` +
        `${frame.tokens_per_forward.toFixed(2)} tokens per forward · ${frame.computed} positions computed · ` +
        `${frame.seconds.toFixed(2)} s, ${frame.queue_seconds.toFixed(2)} s in the queue`;
    }
    const choice = event.choices[0];
    if (choice?.delta?.content) answer.querySelector("p").append(choice.delta.content);
    if (choice?.trace) begin(index, choice.trace);
  }
}

/* Puts a trace in its place; the other one stays. */
function begin(index, t) {
  const at = Number(slider.value), follow = at >= longest, all = views.map((view) => view.t);
  all[index] = t;
  show(Array.from(all, (one, i) => one ?? { ...t, ...named(request(methods[i])), steps: [], final: [] }));
  set(follow ? longest : at);
}

function bubble(role, text) {
  const box = document.createElement("p");
  box.className = role;
  box.textContent = text;
  $("turns").append(box);
}

/* Answers `text` after the messages before it.  What fails or is stopped leaves no message behind. */
async function answer(text) {
  trouble("");
  asked = text;
  running = new AbortController();
  const signal = running.signal, chosen = $("compare").checked ? methods : methods.slice(0, 1);
  show([]);
  $("shown").hidden = true;
  $("turns").replaceChildren();
  for (const { role, content } of [...turns, { role: "user", content: text }]) bubble(role, content);
  $("answers").replaceChildren(...chosen.map(() => {
    const box = document.createElement("div");
    box.append(document.createElement("p"), document.createElement("small"));
    return box;
  }));
  enable();
  const done = await Promise.all(chosen.map((method, index) => write(index, method, signal).then(() => true, (error) => {
    if (error.name === "AbortError") return false;
    const name = method.querySelector(".sampler").value.trim();
    trouble([$("trouble").textContent, chosen.length > 1 ? `${name}: ${error.message}` : error.message].filter(Boolean).join("\n"));
    return false;
  })));
  running = null;
  if (!done.includes(true)) {
    asked = "";
    $("prompt").value ||= text;
  }
  enable();
  return Boolean(asked);
}

function enable() {
  $("go").disabled = running !== null;
  $("halt").disabled = running === null;
  $("again").disabled = running !== null || !asked;
  $("new").disabled = running !== null || !$("turns").childElementCount;
}

/* The answer that the next message follows: the first that is whole. */
function settle() {
  if (!asked) return;
  const whole = [...$("answers").children].find((box) => box.querySelector("small").textContent);
  turns.push({ role: "user", content: asked }, { role: "assistant", content: whole.querySelector("p").textContent });
  asked = "";
}

async function go(event) {
  event?.preventDefault();
  if (running || !$("ask").reportValidity()) return;
  settle();
  const text = $("prompt").value;
  if (await answer(text)) $("prompt").value = "";
  $("prompt").focus();
}

function fresh() {
  turns = [];
  asked = "";
  $("turns").replaceChildren();
  $("answers").replaceChildren();
  trouble("");
  enable();
  $("prompt").focus();
}

async function look() {
  try {
    const state = await (await fetch("ready")).json();
    $("queue").textContent = `${state.running} running, ${state.waiting} waiting`;
  } catch { $("queue").textContent = "the server does not answer"; }
}

$("ask").addEventListener("submit", go);
$("halt").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => { if (asked && !running) answer(asked); });
$("new").addEventListener("click", fresh);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go(event);
});
$("compare").addEventListener("change", () => {
  for (const part of methods[1].querySelectorAll(".sampler, .cache")) part.disabled = !$("compare").checked;
});
$("key").addEventListener("change", setUp);
setUp();
look();
setInterval(look, 1000);
