"use strict";
// All text enters the page as text nodes; nothing here may build HTML from strings.
const data = JSON.parse(document.getElementById("data").textContent);
const template = new Set(data.template);
const $ = (id) => document.getElementById(id);

const KINDS = {
  act: ["sampled, trained", "action mask 1: these tokens carry the loss"],
  off: ["sampled, not trained", "evaluation, or an outcome that is masked or dropped"],
  obs: ["prompt and observation", "action mask 0"],
  tpl: ["template", "added tokens that the chat template put in, action mask 0"],
  old: ["response of an earlier step", "action mask 0 here: it was sampled in its own step"],
};

const state = { shown: [], chosen: null, colour: "mask", tokens: new Map() };

function el(tag, cls, ...children) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== "") node.append(child);
  return node;
}

function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x)) return String(x);
  if (x !== 0 && Math.abs(x) < 0.001) return x.toExponential(1);
  return x.toFixed(digits).replace(/\.?0+$/, "");
}

const signed = (x) => (typeof x === "number" && x > 0 ? "+" : "") + number(x).replace("-", "−");
const json = (x) => (typeof x === "string" ? x : JSON.stringify(x, null, 1));
const tone = (x) => (typeof x !== "number" || x === 0 ? "flat" : x > 0 ? "good" : "bad");
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const chip = (cls, ...children) => el("span", `chip ${cls}`, ...children);
const heading = (trajectory) => trajectory.info.question ?? trajectory.task;
const answers = (trajectory) => [trajectory.info.answers ?? trajectory.info.answer ?? []].flat().map(json);

function mean(values) {
  const known = values.filter((x) => typeof x === "number");
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function advantageAt(step, k) {
  return Array.isArray(step.advantages) ? step.advantages[k] : step.advantages;
}

function stepAdvantage(step) {
  return Array.isArray(step.advantages) ? mean(step.advantages) : step.advantages;
}

// Rebuilds every prompt from what it reuses, with the origin of each token: [{reused, fresh, response}].
function contexts(trajectory) {
  let previous = [];
  const prompt = ({ reuse, new: ids }) => ({
    reused: previous.slice(0, reuse),
    fresh: ids.map((v) => ({ v, kind: template.has(v) ? "tpl" : "obs" })),
  });
  const out = trajectory.steps.map((step) => {
    const { reused, fresh } = prompt(step);
    const response = step.response.map((v, k) => {
      return { v, kind: trajectory.trained ? "act" : "off", logprob: step.logprobs[k], advantage: advantageAt(step, k) };
    });
    const earlier = response.map((token) => ({ ...token, kind: "old", advantage: undefined }));
    previous = [...reused, ...fresh, ...earlier];
    return { reused, fresh, response };
  });
  return { steps: out, final: trajectory.final && prompt(trajectory.final) };
}

function tint(token, scale) {
  if (token.kind !== "act" && token.kind !== "off") return null;
  const of = (strength, colour) => `color-mix(in srgb, var(--${colour}) ${Math.round(70 * strength)}%, transparent)`;
  if (state.colour === "logprob" && typeof token.logprob === "number") return of(Math.min(1, -token.logprob / 4), "bad");
  if (state.colour === "advantage" && typeof token.advantage === "number") {
    return of(Math.min(1, Math.abs(token.advantage) / scale), token.advantage >= 0 ? "good" : "bad");
  }
  return null;
}

function tokenNode(token, scale) {
  const node = el("span", `t ${token.kind}`);
  const piece = data.pieces[token.v];
  if (piece === "") node.append(el("i", "", `⟨${data.ids[token.v]}⟩`));
  piece.split(/(\n|\t)/).forEach((part) => {
    if (part === "\n") node.append(el("i", "", "↵"), "\n");
    else if (part === "\t") node.append(el("i", "", "⇥"), "\t");
    else if (part) node.append(part);
  });
  if (state.colour !== "mask" && (token.kind === "act" || token.kind === "off")) {
    node.classList.add("tinted");
    node.style.backgroundColor = tint(token, scale) ?? "transparent";
  }
  state.tokens.set(node, token);
  return node;
}

function tokenBlock(cls, tokens, scale) {
  return el("div", `tokens ${cls}`, tokens.map((token) => tokenNode(token, scale)));
}

// A folded block whose body is built when it is first opened.
function folded(cls, label, build, open = false) {
  const node = el("details", cls, el("summary", "", label));
  const fill = () => node.open && node.children.length === 1 && node.append(build());
  node.addEventListener("toggle", fill);
  node.open = open;
  fill();
  return node;
}

function promptNodes({ reused, fresh }, scale) {
  const nodes = [];
  if (reused.length) {
    const label = `${plural(reused.length, "token")} reused from the previous prompt and response`;
    nodes.push(folded("reused", label, () => tokenBlock("prompt", reused, scale)));
  }
  if (fresh.length) nodes.push(tokenBlock("prompt", fresh, scale));
  return nodes;
}

function glimpse(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 140 ? `${line.slice(0, 140)}…` : line;
}

function textFold(cls, name, text, open = false) {
  return folded(cls, [el("b", "", name), el("span", "peek", glimpse(text))], () => el("pre", "", text), open);
}

function callNode(call) {
  const { name, arguments: given, ok, error, result, ...rest } = call;
  const failed = ok === false || (error !== null && error !== undefined);
  const why = failed ? (error && error.kind ? `${error.kind}${error.fault ? `, fault: ${error.fault}` : ""}` : json(error ?? "failed")) : "ok";
  const shown = given === null || given === undefined ? "" : typeof given === "string" ? given : JSON.stringify(given);
  const head = el("div", "callhead", el("code", "fn", String(name ?? "(no name)")), el("code", "args", shown), chip(failed ? "bad" : "good", why));
  const text = data.texts[result];
  const more = Object.keys(rest).length ? textFold("text", "more", json(rest)) : null;
  return el("div", "call", head, text && textFold("text", "result", text), more);
}

function rewardChips(step) {
  const parts = Object.entries(step.parts).map(([name, x]) => chip(`part ${tone(x)}`, `${name} `, el("b", "", signed(x))));
  const total = step.reward === null ? chip("flat", "reward unknown") : chip(tone(step.reward), "reward ", el("b", "", signed(step.reward)));
  return [total, parts];
}

function stepNode(trajectory, step, context, t, scale) {
  const finish = step.info.finish_reason;
  const advantage = stepAdvantage(step);
  const spread = Array.isArray(step.advantages) ? "mean advantage " : "advantage ";
  const title = el("h3", "", `Step ${t + 1}`, el("small", "", ` of ${trajectory.steps.length}`));
  const head = el("div", "stephead", title, rewardChips(step));
  if (advantage !== null && advantage !== undefined) head.append(chip(tone(advantage), spread, el("b", "", signed(advantage))));
  const facts = [
    `${plural(context.reused.length + context.fresh.length, "prompt token")}, ${context.fresh.length.toLocaleString("en")} new`,
    plural(context.response.length, "response token"),
    finish !== undefined && `finish: ${json(finish)}`,
    `context: ${step.rule}`,
    `policy version ${step.version}`,
    step.state_key !== null && ["state ", el("code", "", json(step.state_key))],
  ];
  const last = t === trajectory.steps.length - 1 && !trajectory.final;
  const info = Object.fromEntries(Object.entries(step.info).filter(([key]) => key !== "finish_reason"));
  const observation = data.texts[step.observation];
  return el(
    "article",
    "step",
    head,
    el("p", "facts", facts.filter(Boolean).map((fact) => el("span", "", fact))),
    promptNodes(context, scale),
    context.response.length ? tokenBlock(trajectory.trained ? "response" : "response untrained", context.response, scale) : el("p", "none", "empty response"),
    step.calls.map(callNode),
    observation && textFold("text", "observation", observation, last),
    Object.keys(info).length ? textFold("text", "info", json(info)) : null,
  );
}

function legendNode(contextSteps, scale) {
  const seen = new Set(contextSteps.flatMap((c) => [...c.fresh, ...c.response].map((token) => token.kind)));
  if (contextSteps.length > 1) seen.add("old");
  const keys = Object.entries(KINDS)
    .filter(([kind]) => seen.has(kind))
    .map(([kind, [name, why]]) => {
      const key = el("span", "key", el("span", `t ${kind}`, "token"), name);
      key.title = why;
      return key;
    });
  const select = el("select");
  select.setAttribute("aria-label", "colour of sampled tokens");
  for (const [value, label] of [["mask", "colour by mask"], ["logprob", "colour by log-prob"], ["advantage", "colour by advantage"]]) select.append(new Option(label, value, false, value === state.colour));
  const advantage = `green above 0, red below, full at ±${number(scale)}`;
  const note = { mask: "", logprob: "red: unlikely, full at −4 nats", advantage }[state.colour];
  select.addEventListener("change", () => {
    state.colour = select.value;
    renderDetail(false);
  });
  const unfold = el("button", "quiet", "unfold all");
  unfold.addEventListener("click", () => {
    const folds = [...$("detail").querySelectorAll("details")];
    const open = folds.some((fold) => !fold.open);
    for (const fold of folds) fold.open = open;
    unfold.textContent = open ? "fold all" : "unfold all";
  });
  return el("div", "legend", keys, el("span", "tools", note && el("span", "note", note), select, unfold));
}

function pairs(entries) {
  return el("dl", "pairs", entries.map(([name, value]) => [el("dt", "", name), el("dd", "", value)]));
}

function endNode(trajectory, final, scale) {
  const { policy, info, metrics } = trajectory;
  const meaning = {
    reward: { use: "its rewards count", zero: "its reward counts as 0", none: "it has no reward" }[policy.reward],
    training: { train: "its tokens are trained", mask: "its tokens are masked", drop: "it is dropped from its group" }[policy.training],
    evaluation: "nothing is trained on an evaluation",
    future: policy.bootstrap ? "cut: the value of its last observation stands for the future" : "ended: its future is worth 0",
  };
  const trained = trajectory.trained || policy.training !== "train";
  const { question, answers: _gold, answer: _other, kind, ...rest } = info;
  const entries = [["outcome", [outcomeChip(trajectory), ` ${meaning.reward}; ${trained ? meaning.training : meaning.evaluation}; ${meaning.future}`]]];
  if (question !== undefined) entries.push(["question", json(question)]);
  if (answers(trajectory).length) entries.push(["gold answer", answers(trajectory).join("  ·  ")]);
  if (kind !== undefined) entries.push(["kind", json(kind)]);
  entries.push(["total reward", el("b", tone(trajectory.reward), signed(trajectory.reward))]);
  for (const [name, value] of Object.entries(metrics)) entries.push([name, number(value)]);
  const next = final && el("div", "", el("p", "facts", "The next prompt, had it gone on:"), promptNodes(final, scale));
  const more = Object.keys(rest).length ? textFold("text", "info", json(rest)) : null;
  return el("article", "step end", el("div", "stephead", el("h3", "", "End")), next, pairs(entries), more);
}

function outcomeChip(trajectory) {
  const kind = trajectory.policy.training === "drop" ? "bad" : trajectory.policy.bootstrap || trajectory.outcome === "parse_failure" ? "warn" : "plain";
  return chip(kind, trajectory.outcome.replaceAll("_", " "));
}

function stripNode(trajectory) {
  const cells = trajectory.steps.map((step, t) => {
    const advantage = stepAdvantage(step);
    const names = step.calls.map((call) => call.name ?? "?").join(", ");
    const more = advantage === null || advantage === undefined ? "" : `A ${signed(advantage)}`;
    const cell = el("button", `cell ${tone(step.reward)}`, el("b", "", `${t + 1}`), el("span", "", names || "no call"));
    cell.append(el("em", "", `r ${step.reward === null ? "?" : signed(step.reward)}`), more && el("em", "", more));
    cell.addEventListener("click", () => $("detail").querySelectorAll("article")[t].scrollIntoView({ behavior: "smooth" }));
    return cell;
  });
  return el("nav", "strip", cells);
}

function renderDetail(scroll = true) {
  const trajectory = state.chosen;
  const section = $("detail");
  state.tokens.clear();
  if (!trajectory) return section.replaceChildren(el("p", "none", data.trajectories.length ? "Nothing matches the filters." : "This report has no trajectories."));
  const { steps, final } = contexts(trajectory);
  const sizes = trajectory.steps.flatMap((step) => [step.advantages].flat()).filter((x) => typeof x === "number");
  const scale = sizes.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
  const metrics = Object.entries(trajectory.metrics).map(([name, x]) => chip("plain", `${name} `, el("b", "", number(x))));
  const gold = answers(trajectory);
  const head = el(
    "div",
    "head",
    el("p", "uid", trajectory.uid),
    el("h2", "", json(heading(trajectory))),
    gold.length ? el("p", "gold", "gold answer ", el("b", "", gold.join("  ·  "))) : null,
    el("p", "chips", outcomeChip(trajectory), chip(tone(trajectory.reward), "reward ", el("b", "", signed(trajectory.reward))), metrics),
    el("p", "facts", [trajectory.task, `group ${trajectory.group}, sample ${trajectory.sample}`, `seed ${trajectory.seed}`].map((x) => el("span", "", x))),
  );
  const nodes = trajectory.steps.map((step, t) => stepNode(trajectory, step, steps[t], t, scale));
  section.replaceChildren(head, stripNode(trajectory), legendNode(steps, scale), ...nodes, endNode(trajectory, final, scale));
  if (scroll && section.getBoundingClientRect().top < 0) section.scrollIntoView();
}

function haystack(trajectory) {
  if (trajectory.hay === undefined) {
    const pieces = (ids) => ids.map((v) => data.pieces[v]).join("");
    const steps = trajectory.steps.map((s) => [pieces(s.new), pieces(s.response), data.texts[s.observation], JSON.stringify(s.calls), s.state_key].join("\n"));
    trajectory.hay = [trajectory.uid, trajectory.task, JSON.stringify(trajectory.info), ...steps].join("\n").toLowerCase();
  }
  return trajectory.hay;
}

function itemNode(trajectory) {
  const { em } = trajectory.metrics;
  const mark = em === undefined ? ["flat", "·"] : em >= 1 ? ["good", "✓"] : ["bad", "✗"];
  const label = el("span", `mark ${mark[0]}`, mark[1]);
  label.title = em === undefined ? "no em" : `em ${number(em)}`;
  const foot = [trajectory.phase, trajectory.outcome.replaceAll("_", " "), plural(trajectory.steps.length, "step")];
  const facts = el("span", "foot", foot.map((x) => el("span", "", x)));
  const body = el("span", "body", el("span", "q", json(heading(trajectory))), facts, el("span", "id", trajectory.uid));
  const button = el("button", "item", label, body, el("span", `r ${tone(trajectory.reward)}`, signed(trajectory.reward)));
  button.addEventListener("click", () => choose(trajectory));
  trajectory.button = button;
  return el("li", "", button);
}

function choose(trajectory, scroll = true) {
  state.chosen?.button?.removeAttribute("aria-current");
  state.chosen = trajectory ?? null;
  if (trajectory) {
    trajectory.button.setAttribute("aria-current", "true");
    const list = $("list").getBoundingClientRect();
    const item = trajectory.button.getBoundingClientRect();
    if (item.top < list.top) $("list").scrollTop += item.top - list.top;
    if (item.bottom > list.bottom) $("list").scrollTop += item.bottom - list.bottom;
    history.replaceState(null, "", `#${encodeURIComponent(trajectory.uid)}`);
  }
  renderDetail(scroll);
}

function renderList() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [phase, outcome, order] = ["phase", "outcome", "order"].map((id) => $(id).value);
  const value = (x) => (typeof x.reward === "number" ? x.reward : order === "low" ? Infinity : -Infinity);
  const by = { high: (a, b) => value(b) - value(a), low: (a, b) => value(a) - value(b), long: (a, b) => b.steps.length - a.steps.length };
  state.shown = data.trajectories.filter(
    (x) => (!phase || x.phase === phase) && (!outcome || x.outcome === outcome) && words.every((word) => haystack(x).includes(word)),
  );
  if (order) state.shown.sort((a, b) => by[order](a, b) || 0);
  $("list").replaceChildren(...state.shown.map(itemNode));
  const reward = mean(state.shown.map((x) => x.reward));
  const em = mean(state.shown.map((x) => x.metrics.em));
  const facts = [`${state.shown.length} of ${data.trajectories.length}`, reward !== null && `mean reward ${signed(reward)}`, em !== null && `em ${number(em)}`];
  $("count").textContent = facts.filter(Boolean).join(" · ");
  choose(state.shown.includes(state.chosen) ? state.chosen : state.shown[0], false);
}

function fillSelect(id, all, key) {
  const counts = new Map();
  for (const x of data.trajectories) counts.set(x[key], (counts.get(x[key]) ?? 0) + 1);
  $(id).replaceChildren(new Option(all, ""), ...[...counts].map(([name, n]) => new Option(`${name.replaceAll("_", " ")} (${n})`, name)));
}

function showTip(event) {
  const node = event.target.closest?.(".t");
  const token = node && state.tokens.get(node);
  $("tip").hidden = !token;
  if (!token) return;
  const rows = [["piece", JSON.stringify(data.pieces[token.v])], ["id", String(data.ids[token.v])]];
  if (token.logprob !== undefined) {
    rows.push(["log-prob", number(token.logprob, 4)]);
    if (typeof token.logprob === "number") rows.push(["prob", number(Math.exp(token.logprob), 4)]);
  }
  if (token.advantage !== undefined && token.advantage !== null) rows.push(["advantage", signed(token.advantage)]);
  $("tip").replaceChildren(pairs(rows), el("p", "", KINDS[token.kind][0]));
  const box = node.getClientRects()[0];
  const { offsetWidth: width, offsetHeight: height } = $("tip");
  $("tip").style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 12))}px`;
  $("tip").style.top = `${box.bottom + height + 10 > innerHeight ? box.top - height - 6 : box.bottom + 6}px`;
}

function moveBy(event) {
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.metaKey || event.ctrlKey || event.altKey) return;
  const by = { j: 1, k: -1 }[event.key];
  const next = by && state.shown[state.shown.indexOf(state.chosen) + by];
  if (next) choose(next);
}

function wanted() {
  let uid = location.hash.slice(1);
  try {
    uid = decodeURIComponent(uid);
  } catch {
    // A hand-written address with a stray % is taken as it stands.
  }
  return data.trajectories.find((x) => x.uid === uid);
}

fillSelect("phase", "all phases", "phase");
fillSelect("outcome", "all outcomes", "outcome");
state.chosen = wanted() ?? null;
renderList();
for (const id of ["phase", "outcome", "order"]) $(id).addEventListener("change", renderList);
$("search").addEventListener("input", renderList);
addEventListener("hashchange", () => {
  const trajectory = wanted();
  if (trajectory?.button?.isConnected) choose(trajectory);
});
addEventListener("mouseover", showTip);
addEventListener("scroll", () => ($("tip").hidden = true), { capture: true, passive: true });
addEventListener("keydown", moveBy);
