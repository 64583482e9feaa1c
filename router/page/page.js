// The page at `/`: reads `status` every two seconds, and chats through the same API as any client.
// Everything that comes from outside is set as text, never as HTML. The key lives in this module alone.

const EVERY_MS = 2000;
const byId = (id) => document.getElementById(id);
const conversation = [];
let key = "";

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function headers() {
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

const ms = (value) => (value == null ? "" : value < 10_000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);
const count = (value) => new Intl.NumberFormat().format(value);

function pill(text, kind) {
  return make("span", `pill ${kind}`, text);
}

// ---- status

async function refresh() {
  try {
    const response = await fetch("status", { headers: headers(), cache: "no-store" });
    if (response.status === 401) return askForKey();
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    show(await response.json());
  } catch (error) {
    setState("router not reached", "bad");
  }
}

function setState(text, kind) {
  const state = byId("state");
  state.textContent = text;
  state.className = `pill ${kind}`;
}

function askForKey() {
  setState("key needed", "warn");
  byId("key-form").hidden = false;
}

function show(status) {
  byId("key-form").hidden = true;
  if (status.draining) setState("draining", "warn");
  else setState(status.ready ? "ready" : "not all workers are up", status.ready ? "good" : "warn");
  showTotals(status);
  byId("tiers").replaceChildren(...status.tiers.map(tierCard));
  byId("policies").replaceChildren(...status.policies.map(policyChip));
  byId("decisions").replaceChildren(...status.decisions.map(decisionRow));
  byId("no-decisions").hidden = status.decisions.length > 0;
  offerModels(status);
}

function showTotals(status) {
  const { totals } = status;
  const shown = {
    "in flight": status.in_flight, queued: status.queued, requests: totals.requests, escalated: totals.escalated,
    lifted: totals.lifted, failed: totals.failed,
  };
  byId("totals").replaceChildren(
    ...Object.entries(shown).map(([name, n]) => make("div", "", make("dt", "", name), make("dd", "", count(n)))),
  );
}

function tierCard(tier) {
  const up = tier.workers.some((worker) => worker.up);
  const head = make("div", "head", make("strong", "", tier.name), make("span", "faint", tier.served));
  head.append(pill(up ? "up" : "down", up ? "good" : "bad"));
  return make("div", "card", head, ...tier.workers.map(workerLine));
}

function workerLine(worker) {
  const line = make("div", "worker", make("span", "", worker.address));
  if (!worker.up) line.append(pill("down", "bad"));
  if (worker.breaker !== "closed") line.append(pill(`breaker ${worker.breaker}`, "warn"));
  line.append(make("span", "", `${worker.in_flight} in flight`));
  if (worker.queued != null) line.append(make("span", "", `${worker.queued} queued`));
  if (worker.error) line.append(make("span", "error", worker.error));
  return line;
}

function policyChip(policy) {
  const chip = make("li", "", policy.name, " ", make("small", "", policy.method));
  if (policy.default) chip.append(" ", make("small", "", "default"));
  return chip;
}

function decisionRow(made) {
  const time = new Date(made.at * 1000).toLocaleTimeString([], { hour12: false });
  const by = make("td", "", made.tier || "nobody");
  if (made.outcome !== "answered") by.append(" ", pill(made.outcome, made.outcome === "cancelled" ? "warn" : "bad"));
  else if (made.path !== "kept") by.append(" ", pill(made.path, "good"));
  const why = make("td", "", made.reason);
  return make("tr", "", make("td", "", time), make("td", "wide", made.policy), by, why,
    make("td", "n wide", ms(made.ms.ttft)), make("td", "n", ms(made.ms.total)));
}

function offerModels(status) {
  const select = byId("model");
  const names = ["kvlift", ...status.policies.map((p) => p.name), ...status.tiers.map((t) => t.name)];
  if (select.options.length === names.length) return;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
}

// ---- chat

function addMessage(role, text) {
  const item = make("li", role, make("div", "text", text));
  byId("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  const item = addMessage("assistant pending", "");
  byId("send").disabled = true;
  try {
    const said = await stream(item);
    conversation.push({ role: "assistant", content: said });
  } catch (error) {
    item.classList.add("failed");
    item.querySelector(".text").append(item.querySelector(".text").textContent ? "\n" : "", String(error.message || error));
    conversation.pop();  // a question without an answer is not part of what comes next
  } finally {
    item.classList.remove("pending");
    byId("send").disabled = false;
    refresh();
  }
}

async function stream(item) {
  const started = performance.now();
  const system = byId("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  const body = JSON.stringify({ model: byId("model").value, messages, stream: true });
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body });
  if (!response.ok) {
    if (response.status === 401) askForKey();
    throw new Error((await response.json()).error?.message ?? `HTTP ${response.status}`);
  }
  const box = item.querySelector(".text");
  let first = null;
  let record = null;
  let ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") { ended = true; break; }
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices?.[0]?.delta?.content;
    if (piece) {
      first ??= performance.now() - started;
      box.append(piece);
      item.scrollIntoView({ block: "end" });
    }
    record = event.kvlift ?? record;
  }
  if (!ended) throw new Error("the answer was cut off");
  item.append(explanation(record, first));
  item.scrollIntoView({ block: "end" });
  return box.textContent;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data:")) yield part.slice(5).trim();
    }
  }
}

function explanation(record, first) {
  const line = make("p", "why");
  if (!record) return line;
  const last = record.attempts.at(-1);
  line.append(make("strong", "", record.tier), make("span", "", last?.served ?? ""));
  line.append(make("span", "", record.escalated ? `escalated: ${record.reason}` : record.reason));
  if (record.lift) line.append(...liftWords(record.lift));
  const confidence = record.attempts.find((attempt) => attempt.confidence != null);
  if (confidence) line.append(make("span", "", `confidence of ${confidence.tier} ${confidence.confidence.toFixed(3)}`));
  if (first != null) line.append(make("span", "", `first token after ${ms(first)}`));
  return line;
}

function liftWords(lift) {
  if (lift.status !== "applied") return [pill(`lift: ${lift.status}`, "warn"), make("span", "", lift.reason ?? "")];
  const { prompt, recomputed } = lift.tokens;
  const share = `${recomputed} of ${prompt} positions recomputed in ${ms(lift.ms?.total)}`;
  return [pill("lifted", "good"), make("span", "", share)];
}

// ---- what a person does

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || byId("send").disabled) return;
  byId("text").value = "";
  ask(text);
});

byId("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});

byId("fresh").addEventListener("click", () => {
  conversation.length = 0;
  byId("messages").replaceChildren();
  byId("text").focus();
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  byId("key").value = "";
  refresh();
});

refresh();
setInterval(refresh, EVERY_MS);
