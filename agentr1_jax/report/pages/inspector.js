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

// chosen: the facts of a trajectory; full: the same with its tokens; step: of the open account, from 0.
const state = { shown: [], chosen: null, full: null, step: null, colour: "mask", tokens: new Map(), found: new Map(), search: 0 };
const groups = new Map();
for (const x of data.trajectories) {
  if (!groups.has(x.group)) groups.set(x.group, []);
  groups.get(x.group).push(x);
}
const listed = data.trajectories.filter((x) => x.blob !== null);

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

const signed = (x, digits = 3) => (typeof x === "number" && x > 0 ? "+" : "") + number(x, digits).replace("-", "−");
const json = (x) => (typeof x === "string" ? x : JSON.stringify(x, null, 1));
const tone = (x) => (typeof x !== "number" || x === 0 ? "flat" : x > 0 ? "good" : "bad");
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const chip = (cls, ...children) => el("span", `chip ${cls}`, ...children);
const heading = (trajectory) => trajectory.question ?? trajectory.task;
const of = (values, k) => (Array.isArray(values) ? values[k] : values);
const exists = (x) => x !== null && x !== undefined;

// Unpacks the tokens of one trajectory; only those of the chosen one are kept.
async function load(facts) {
  const packed = Uint8Array.from(atob($(`t${facts.blob}`).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const whole = JSON.parse(await new Response(stream).text());
  return { ...facts, ...whole, steps: whole.steps.map((step, t) => ({ ...facts.steps[t], ...step })) };
}

function mean(values) {
  const known = values.filter((x) => typeof x === "number");
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
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
      const [logprob, advantage, value, target] = [step.logprobs, step.advantages, step.values, step.targets].map((x) => of(x, k));
      return { v, kind: trajectory.trained ? "act" : "off", logprob, advantage, value, target };
    });
    const earlier = response.map(({ v, logprob }) => ({ v, logprob, kind: "old" }));
    previous = [...reused, ...fresh, ...earlier];
    return { reused, fresh, response };
  });
  return { steps: out, final: trajectory.final && prompt(trajectory.final) };
}

function tint(token, scale) {
  if (token.kind !== "act" && token.kind !== "off") return null;
  if (state.colour === "logprob" && typeof token.logprob === "number") return wash("bad", -token.logprob / 4);
  if (state.colour === "advantage" && typeof token.advantage === "number") return wash(tone(token.advantage), token.advantage / scale);
  return null;
}

// A colour of strength |x| up to 1, mixed into what is behind it.
function wash(colour, x, most = 70) {
  return `color-mix(in srgb, var(--${colour === "flat" ? "soft" : colour}) ${Math.round(most * Math.min(1, Math.abs(x)))}%, transparent)`;
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
  const text = state.full.texts[result];
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
  const title = el("h3", "", `Step ${t + 1}`, el("small", "", ` of ${trajectory.steps.length}`));
  const head = el("div", "stephead", title, rewardChips(step));
  if (exists(step.advantage)) head.append(advantageButton(step, t));
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
  const observation = trajectory.texts[step.observation];
  return el(
    "article",
    "step",
    head,
    el("div", "opened"),
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
  const { question: _question, answers: _gold, answer: _other, kind, ...rest } = info;
  const entries = [["outcome", [outcomeChip(trajectory), ` ${meaning.reward}; ${trained ? meaning.training : meaning.evaluation}; ${meaning.future}`]]];
  if (trajectory.question !== null) entries.push(["question", trajectory.question]);
  if (trajectory.gold.length) entries.push(["gold answer", trajectory.gold.join("  ·  ")]);
  if (kind !== undefined) entries.push(["kind", json(kind)]);
  entries.push(["total reward", el("b", tone(trajectory.reward), signed(trajectory.reward))]);
  for (const [name, value] of Object.entries(metrics)) entries.push([name, number(value)]);
  const next = final && el("div", "", el("p", "facts", "The next prompt, had it gone on:"), promptNodes(final, scale));
  const more = Object.keys(rest).length ? textFold("text", "info", json(rest)) : null;
  return el("article", "step end", el("div", "stephead", el("h3", "", "End")), next, pairs(entries), more);
}

function outcomeChip(trajectory) {
  const kind = trajectory.policy.training === "drop" || trajectory.policy.reward === "zero" ? "bad" : trajectory.policy.bootstrap || trajectory.outcome === "parse_failure" ? "warn" : "plain";
  return chip(kind, trajectory.outcome.replaceAll("_", " "));
}

function advantageButton(step, t) {
  const label = Array.isArray(step.advantages) ? "mean advantage " : "advantage ";
  const button = el("button", `chip why ${tone(step.advantage)}`, label, el("b", "", signed(step.advantage)), el("span", "ask", "why?"));
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => openAccount(state.step === t ? null : t));
  return button;
}

const largest = (values) => values.reduce((a, b) => Math.max(a, typeof b === "number" ? Math.abs(b) : 0), 0) || 1;
const groupScale = (trajectory) => largest(groups.get(trajectory.group).flatMap((x) => x.steps.map((step) => step.advantage)));

function stripNode(trajectory) {
  const scale = groupScale(trajectory);
  const cells = trajectory.steps.map((step, t) => {
    const known = typeof step.advantage === "number";
    const cell = el("button", `cell ${tone(known ? step.advantage : step.reward)}`, el("b", "", `${t + 1}`), el("span", "", step.tools.join(", ") || "no call"));
    cell.append(el("em", "", `r ${step.reward === null ? "?" : signed(step.reward)}`), known ? el("em", "A", `A ${signed(step.advantage)}`) : "");
    if (known) cell.style.backgroundColor = wash(tone(step.advantage), step.advantage / scale, 34);
    cell.title = step.action;
    cell.addEventListener("click", () => openAccount(t, true));
    return cell;
  });
  return el("nav", "strip", cells);
}

// The first step at which two members of a group differ, and in what; null where nothing differs.
function parting(one, other) {
  const shorter = Math.min(one.path.length, other.path.length);
  for (let t = 0; t < shorter; t++) {
    if (one.path[t][0] !== other.path[t][0]) return { t, what: "state" };
    if (one.path[t][1] !== other.path[t][1]) return { t, what: "action" };
  }
  return one.path.length === other.path.length ? null : { t: shorter, what: "end" };
}

function openAccount(t, scroll = false) {
  state.step = t;
  $("detail").querySelectorAll("article").forEach((article, k) => {
    const place = article.querySelector(".opened");
    const opens = k === t && Boolean(place) && (exists(state.full.steps[t].advantage) || groups.get(state.full.group).length > 1);
    place?.replaceChildren(opens ? accountNode(state.full, t) : "");
    article.querySelector(".why")?.setAttribute("aria-expanded", String(opens));
    if (k === t && scroll) article.scrollIntoView();
  });
  $("detail").querySelectorAll(".cell").forEach((cell, k) => cell.toggleAttribute("aria-current", k === t));
  writeAddress();
}

function accountNode(trajectory, t) {
  const values = valuesNode(trajectory, t);
  const members = groups.get(trajectory.group);
  const group = members.length > 1 ? groupNode(trajectory, members) : "";
  // Without values there is room for the group beside the ledger.
  return el("section", values ? "account" : "account beside", el("div", "reckoning", ledgerNode(trajectory.steps[t]), values), group);
}

function ledgerNode(step) {
  const line = (cls, name, value) => el("tr", cls, el("td", "", name), el("td", "", value));
  const terms = step.account.map(({ name, plus, minus, weight, std, total }) => {
    const parts = [...Object.entries(plus).map(([key, x]) => [key, x]), ...Object.entries(minus).map(([key, x]) => [key, typeof x === "number" ? -x : x])];
    const rows = parts.map(([key, x], k) => line("", key, k || x < 0 ? signed(x, 4) : number(x, 4)));
    if (weight !== 1) rows.push(line("factor", "weight", `× ${number(weight, 4)}`));
    if (std !== 1) rows.push(line("factor", "std", `÷ ${number(std, 4)}`));
    if (rows.length > 1 || parts[0]?.[0] !== name) rows.unshift(el("tr", "", el("th", "", name), el("th", "", "")));
    if (rows.length > 2) rows.push(line("sum", "", signed(total, 4)));
    return el("tbody", "", rows);
  });
  const several = Array.isArray(step.advantages);
  const whole = el("tr", `total ${tone(step.advantage)}`, el("th", "", several ? "A, mean of the tokens" : "A"), el("td", "", exists(step.advantage) ? signed(step.advantage, 4) : "none"));
  const why = !exists(step.advantage) ? "Training gave this step no advantage." : step.account.length ? "" : "The credit scheme names no terms, so only the advantage itself is recorded.";
  return el("div", "ledger", el("h4", "", "Why this advantage"), why && el("p", "none", why), el("table", "", terms, el("tbody", "", whole)));
}

// δ = r + γV′ − V, where the account has these quantities under the names of the schemes with a critic.
function difference(step) {
  for (const { plus, minus } of step.account) {
    const parts = [plus.reward, plus["discounted next value"], minus.value];
    if (parts.every((x) => typeof x === "number")) return parts[0] + parts[1] - parts[2];
  }
  return null;
}

function valuesNode(trajectory, t) {
  const errors = trajectory.steps.map(difference);
  const first = trajectory.steps.map((step) => of(step.values, 0));
  if (!first.some(exists)) return "";
  const fixed = (x) => (Math.abs(x) < 0.0005 ? "0" : `${x > 0 ? "+" : "−"}${Math.abs(x).toFixed(3)}`);
  const cell = (x) => el("td", "", typeof x === "number" ? fixed(x) : "–");
  const rows = trajectory.steps.map((step, k) => {
    const last = k + 1 === first.length;
    const next = last ? (trajectory.policy.bootstrap ? trajectory.final_value : 0) : first[k + 1];
    const row = el("tr", k === t ? "own" : "", el("td", "", `${k + 1}`), cell(step.shaped ?? step.reward), cell(first[k]), cell(next), errors.some(exists) ? cell(errors[k]) : "", cell(of(step.targets, 0)), cell(step.advantage));
    row.addEventListener("click", () => openAccount(k, true));
    return row;
  });
  const names = [["step", ""], ["r", "reward as the credit scheme saw it"], ["V", "value of the state, at the first token of the response"], ["V′", "value of the next state; 0 after the end, that of the next prompt where the trajectory was cut"], ...(errors.some(exists) ? [["δ", "r + γV′ − V"]] : []), ["target", "what the critic was trained towards"], ["A", "mean advantage"]];
  const head = el("tr", "", names.map(([name, why]) => Object.assign(el("th", "", name), { title: why })));
  return el("div", "values", el("h4", "", "The critic’s values"), el("div", "wide", el("table", "", el("thead", "", head), el("tbody", "", rows))));
}

function groupNode(trajectory, members) {
  const scale = groupScale(trajectory);
  const rewards = members.map((x) => x.reward).filter((x) => typeof x === "number");
  const centre = mean(rewards);
  const deviation = rewards.length > 1 ? Math.sqrt(rewards.reduce((sum, x) => sum + (x - centre) ** 2, 0) / (rewards.length - 1)) : null;
  const rows = members.map((member) => {
    const part = member === state.chosen ? null : parting(state.chosen, member);
    const cells = member.steps.map((step, k) => {
      const known = typeof step.advantage === "number";
      const cell = el("button", `square${part && k === part.t ? " parts" : ""}${member === state.chosen && k === state.step ? " here" : ""}`, `${k + 1}`);
      cell.title = [step.action, known && `A ${signed(step.advantage)}`, step.reward !== null && `r ${signed(step.reward)}`].filter(Boolean).join("\n");
      if (known) cell.style.backgroundColor = wash(tone(step.advantage), step.advantage / scale);
      cell.disabled = member.blob === null;
      cell.addEventListener("click", () => choose(member, true, k));
      return cell;
    });
    const there = part && member.steps[part.t];
    const parts = member === state.chosen ? "" : !part ? "the same throughout" : !there ? `ends before step ${part.t + 1}` : [el("b", "", `step ${part.t + 1}`), part.what === "state" ? ", another state: " : ": ", there.action];
    const name = el("button", "link", `${member.sample}`);
    name.disabled = member.blob === null;
    name.title = member.blob === null ? "not on this page" : member.uid;
    name.addEventListener("click", () => choose(member, true, part ? Math.min(part.t, member.steps.length - 1) : 0));
    const answer = el("td", "answer", el("span", "", member.answer));
    return el("tr", member === state.chosen ? "own" : "", el("td", "", name), el("td", tone(member.reward), signed(member.reward)), el("td", "squares", cells), el("td", "", member.outcome.replaceAll("_", " ")), answer, el("td", "where", el("span", "", parts)));
  });
  const head = ["sample", "return", "steps", "outcome", "answer", `where it parts from sample ${trajectory.sample}`].map((name) => el("th", "", name));
  const facts = [plural(members.length, "member"), centre !== null && `mean return ${number(centre)}`, deviation !== null && `std ${number(deviation)}`];
  const note = el("p", "facts", facts.filter(Boolean).map((x) => el("span", "", x)));
  return el("div", "group", el("h4", "", "Its group"), note, el("div", "wide", el("table", "", el("thead", "", el("tr", "", head)), el("tbody", "", rows))));
}

async function renderDetail(scroll = true) {
  const chosen = state.chosen;
  const section = $("detail");
  if (!chosen) {
    state.full = null;
    return section.replaceChildren(el("p", "none", listed.length ? "Nothing matches the filters." : "This report has no trajectories."));
  }
  if (state.full?.blob !== chosen.blob) {
    let full;
    try {
      full = await load(chosen);
    } catch (error) {
      return section.replaceChildren(el("p", "none", `This trajectory cannot be unpacked (${error.message}); a browser of 2023 or later is needed.`));
    }
    if (state.chosen !== chosen) return;
    state.full = full;
  }
  const trajectory = state.full;
  state.tokens.clear();
  const { steps, final } = contexts(trajectory);
  const scale = largest(trajectory.steps.flatMap((step) => step.advantages));
  const metrics = Object.entries(trajectory.metrics).map(([name, x]) => chip("plain", `${name} `, el("b", "", number(x))));
  const head = el(
    "div",
    "head",
    el("p", "uid", trajectory.uid),
    el("h2", "", heading(trajectory)),
    trajectory.gold.length ? el("p", "gold", "gold answer ", el("b", "", trajectory.gold.join("  ·  "))) : null,
    el("p", "chips", outcomeChip(trajectory), chip(tone(trajectory.reward), "reward ", el("b", "", signed(trajectory.reward))), metrics),
    el("p", "facts", [trajectory.task, `group ${trajectory.group}, sample ${trajectory.sample}`, `seed ${trajectory.seed}`].map((x) => el("span", "", x))),
  );
  const nodes = trajectory.steps.map((step, t) => stepNode(trajectory, step, steps[t], t, scale));
  section.replaceChildren(head, stripNode(trajectory), legendNode(steps, scale), ...nodes, endNode(trajectory, final, scale));
  if (scroll && section.getBoundingClientRect().top < 0) section.scrollIntoView();
  if (state.step !== null) openAccount(state.step, scroll);
}

function mentions(text, words) {
  const lower = text.toLowerCase();
  return words.every((word) => lower.includes(word));
}

function factsText(x) {
  return [x.uid, x.task, x.question, ...x.gold, x.answer, ...x.steps.map((step) => step.action)].join("\n");
}

function wholeText(full) {
  const pieces = (ids) => ids.map((v) => data.pieces[v]).join("");
  const steps = full.steps.map((s) => [pieces(s.new), pieces(s.response), s.state_key].join("\n"));
  return [factsText(full), JSON.stringify(full.info), ...full.texts, JSON.stringify(full.steps.map((s) => s.calls)), ...steps].join("\n");
}

const words = () => $("search").value.toLowerCase().split(/\s+/).filter(Boolean);

// Facts are searched at once; then every trajectory is unpacked, searched and forgotten, one after the other.
async function searchTokens() {
  const own = ++state.search;
  state.found = new Map();
  renderList();
  const wanted = words();
  if (!wanted.length) return;
  await new Promise((resolve) => setTimeout(resolve, 250));
  let seen = 0;
  for (const x of listed) {
    if (own !== state.search) return;
    if (!mentions(factsText(x), wanted)) state.found.set(x, mentions(wholeText(await load(x)), wanted));
    if (++seen % 24 === 0) $("count").textContent = `searched ${seen} of ${listed.length}`;
  }
  if (own === state.search) renderList();
}

function itemNode(trajectory) {
  const { em } = trajectory.metrics;
  const mark = em === undefined ? ["flat", "·"] : em >= 1 ? ["good", "✓"] : ["bad", "✗"];
  const label = el("span", `mark ${mark[0]}`, mark[1]);
  label.title = em === undefined ? "no em" : `em ${number(em)}`;
  const foot = [trajectory.phase, trajectory.outcome.replaceAll("_", " "), plural(trajectory.steps.length, "step")];
  const facts = el("span", "foot", foot.map((x) => el("span", "", x)));
  const body = el("span", "body", el("span", "q", heading(trajectory)), facts, el("span", "id", trajectory.uid));
  const button = el("button", "item", label, body, el("span", `r ${tone(trajectory.reward)}`, signed(trajectory.reward)));
  button.addEventListener("click", () => choose(trajectory));
  trajectory.button = button;
  return el("li", "", button);
}

function choose(trajectory, scroll = true, step = null) {
  state.chosen?.button?.removeAttribute("aria-current");
  state.chosen = trajectory ?? null;
  state.step = step;
  if (trajectory) {
    trajectory.button?.setAttribute("aria-current", "true");
    const list = $("list").getBoundingClientRect();
    const item = trajectory.button?.isConnected && trajectory.button.getBoundingClientRect();
    if (item && item.top < list.top) $("list").scrollTop += item.top - list.top;
    if (item && item.bottom > list.bottom) $("list").scrollTop += item.bottom - list.bottom;
    writeAddress();
  }
  renderDetail(scroll);
}

// `#uid`, or `#uid/step` with the number of the step whose account is open.
function writeAddress() {
  const step = state.step === null ? "" : `/${state.step + 1}`;
  history.replaceState(null, "", `#${encodeURIComponent(state.chosen.uid)}${step}`);
}

function renderList() {
  const wanted = words();
  const [phase, outcome, order] = ["phase", "outcome", "order"].map((id) => $(id).value);
  const value = (x) => (typeof x.reward === "number" ? x.reward : order === "low" ? Infinity : -Infinity);
  const spread = (x) => {
    const rewards = groups.get(x.group).map((y) => y.reward).filter((y) => typeof y === "number");
    return Math.max(...rewards, -1e300) - Math.min(...rewards, 1e300);
  };
  const by = {
    high: (a, b) => value(b) - value(a),
    low: (a, b) => value(a) - value(b),
    spread: (a, b) => spread(b) - spread(a),
    long: (a, b) => b.steps.length - a.steps.length,
  };
  const matches = (x) => !wanted.length || mentions(factsText(x), wanted) || state.found.get(x);
  state.shown = listed.filter((x) => (!phase || x.phase === phase) && (!outcome || x.outcome === outcome) && matches(x));
  if (order) state.shown.sort((a, b) => by[order](a, b) || 0);
  $("list").replaceChildren(...state.shown.map(itemNode));
  const reward = mean(state.shown.map((x) => x.reward));
  const em = mean(state.shown.map((x) => x.metrics.em));
  const facts = [`${state.shown.length} of ${listed.length}`, reward !== null && `mean reward ${signed(reward)}`, em !== null && `em ${number(em)}`];
  $("count").textContent = facts.filter(Boolean).join(" · ");
  if (state.shown.includes(state.chosen)) choose(state.chosen, false, state.step);
  else choose(state.shown[0], false);
}

function fillSelect(id, all, key) {
  const counts = new Map();
  for (const x of listed) counts.set(x[key], (counts.get(x[key]) ?? 0) + 1);
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
  for (const name of ["advantage", "value", "target"]) if (exists(token[name])) rows.push([name, signed(token[name])]);
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

function wantedByAddress() {
  let address = location.hash.slice(1);
  try {
    address = decodeURIComponent(address);
  } catch {
    // A hand-written address with a stray % is taken as it stands.
  }
  const byUid = (uid) => listed.find((x) => x.uid === uid);
  const [, uid, number] = address.match(/^(.*)\/(\d+)$/s) ?? [];
  const trajectory = byUid(address) ?? byUid(uid);
  const step = trajectory && trajectory.uid !== address ? Number(number) - 1 : null;
  return [trajectory, step !== null && step < trajectory.steps.length && step >= 0 ? step : null];
}

function chooseByAddress() {
  const [trajectory, step] = wantedByAddress();
  if (trajectory) choose(trajectory, true, step);
}

$("notes").replaceChildren(...data.notes.map((note) => el("li", "", note)));
fillSelect("phase", "all phases", "phase");
fillSelect("outcome", "all outcomes", "outcome");
const [named, step] = wantedByAddress();
state.chosen = named ?? null;
renderList();
if (named) choose(named, true, step);
for (const id of ["phase", "outcome", "order"]) $(id).addEventListener("change", renderList);
$("search").addEventListener("input", searchTokens);
addEventListener("hashchange", chooseByAddress);
addEventListener("mouseover", showTip);
addEventListener("scroll", () => ($("tip").hidden = true), { capture: true, passive: true });
addEventListener("keydown", moveBy);
