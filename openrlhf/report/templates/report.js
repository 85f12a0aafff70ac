"use strict";
// The page's data stand in #data; the samples of a served page come from its server. Texts of
// models reach the page as text only: textContent here, the plain formatter in the table.

const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#1f6feb", "#d1570b", "#23863a", "#8250df", "#bf3989", "#777", "#0a7d91", "#9a6700"];
const find = (selector) => document.querySelector(selector);
const escaped = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const quoted = (path) => (/^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`); // for a shell
const number = (value) => (value == null ? "–" : String(Number(value.toPrecision(4))));

function element(tag, text, parent, className) {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.append(made);
  return made;
}

// ---- charts

const LAST_STEP = Math.max(...data.runs.map((run) => run.last_step));
const LAYOUT = {
  height: 260, margin: { l: 50, r: 15, t: 10, b: 35 }, font: { size: 11 }, hovermode: "x unified",
  legend: { orientation: "h", y: -0.22, yanchor: "top" },
  xaxis: { title: { text: "step", standoff: 4 }, dtick: LAST_STEP < 10 ? 1 : undefined }, // no half steps
  yaxis: { exponentformat: "e" },
};

function plot(place, traces, layout = {}) {
  Plotly.newPlot(place, traces, { ...LAYOUT, ...layout }, { displayModeBar: false, responsive: true });
}

function drawPanel(panel, parent) {
  const box = element("div", null, parent, "panel");
  element("h2", panel.title, box);
  element("p", panel.meaning, box);
  const runs = [...new Set(panel.curves.map((curve) => curve.run))];
  const metrics = [...new Set(panel.curves.map((curve) => curve.metric))];
  const traces = panel.curves.map((curve) => {
    const names = [...(data.runs.length > 1 ? [curve.run] : []), ...(metrics.length > 1 ? [curve.metric] : [])];
    // Several runs: a colour for each, a dash for each metric. One run: a colour for each metric.
    const [hue, dash] = data.runs.length > 1
      ? [data.runs.findIndex((run) => run.name === curve.run), metrics.indexOf(curve.metric)]
      : [metrics.indexOf(curve.metric), 0];
    return {
      x: curve.steps, y: curve.values, name: escaped(names.join(" ") || curve.metric),
      mode: curve.is_evaluation || curve.steps.length < 3 ? "lines+markers" : "lines",
      line: { color: COLOURS[hue % COLOURS.length], width: 1.6, dash: ["solid", "dot", "dash", "dashdot"][dash % 4] },
      error_y: curve.errors ? { array: curve.errors, visible: true, thickness: 1 } : undefined,
    };
  });
  plot(element("div", null, box), traces, { showlegend: runs.length > 1 || metrics.length > 1 });
}

function drawPanels(section) {
  const parent = find(`.panels[data-section="${section}"]`);
  for (const panel of data.panels) if (panel.section === section) drawPanel(panel, parent);
  if (section === "curves" && !data.panels.length) element("p", "No step was logged.", parent);
  if (section === "others") parent.parentElement.hidden = !parent.children.length;
}

function drawTimes() {
  const parent = find("#times");
  for (const times of data.times) {
    element("h2", times.run, parent);
    const phases = Object.entries(times.phases);
    const bars = phases.map(([name, seconds], index) => (
      { type: "bar", x: times.steps, y: seconds, name: escaped(name.replaceAll("_", " ")), marker: { color: COLOURS[index % COLOURS.length] } }
    ));
    const total = { x: times.steps, y: times.total, name: "step", mode: "lines", line: { color: "#1d2733", width: 1.5 } };
    const yaxis = { title: { text: "seconds" }, rangemode: "tozero" };
    plot(element("div", null, parent), [...bars, total], { barmode: "stack", bargap: 0.1, height: 320, yaxis });
  }
  if (!data.times.length) element("p", "No times were logged.", parent);
}

function drawHints() {
  if (!data.runs.some((run) => run.hints.length)) return;
  const traces = data.runs.map((run, index) => ({
    x: run.hints.map(([step]) => step), y: run.hints.map(() => escaped(run.name)), mode: "markers", name: escaped(run.name),
    text: run.hints.map(([, text]) => escaped(text.length > 90 ? text.slice(0, 90) + "…" : text)), hoverinfo: "x+text",
    marker: { symbol: "diamond", size: 10, color: COLOURS[index % COLOURS.length] },
  }));
  const steps = [-0.5, LAST_STEP + 0.5];
  const layout = {
    height: 90 + 25 * data.runs.length, showlegend: false, hovermode: "closest", yaxis: { automargin: true },
    xaxis: { ...LAYOUT.xaxis, range: steps },
  };
  plot(find("#hints-chart"), traces, layout);
}

// ---- samples: a server answers, or the excerpt in the page does, in the same words

async function fetched(path, values) {
  const given = Object.entries(values).filter(([, value]) => value != null && value !== "");
  const response = await fetch(`${path}?${new URLSearchParams(given)}`);
  if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
  return response.json();
}

// A condition in a search, the same as in sample_index.py; the rest of the search is text.
const CONDITION = /(?:^|\s)(reward|score|advantage|length)\s*([<>]=?|=)\s*(-?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?=\s|$)/gi;
const HOLDS = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b,
};

function matching(query) {
  const search = query.search || "";
  const conditions = [...search.matchAll(CONDITION)].map(([, name, operator, value]) => (
    [name.toLowerCase().replace("length", "num_actions"), HOLDS[operator], Number(value)]
  ));
  const text = search.replace(CONDITION, "").trim().toLowerCase();
  return data.runs[query.run].samples.filter((sample) => (
    (!query.file || sample.file === query.file)
    && (query.group_id == null || sample.group_id === query.group_id)
    && conditions.every(([name, holds, value]) => sample[name] != null && holds(sample[name], value))
    && (!text || [sample.prompt, sample.response, sample.label].some((own) => (own || "").toLowerCase().includes(text)))
  ));
}

function page(rows, query) {
  const order = new Intl.Collator(undefined, { numeric: true });
  const way = query.is_descending ? -1 : 1;
  const [key, start] = [query.sort, (query.page - 1) * query.size];
  const compare = (a, b) => {
    if (a[key] == null || b[key] == null) return (a[key] == null) - (b[key] == null);
    return way * (typeof a[key] === "number" ? a[key] - b[key] : order.compare(a[key], b[key]));
  };
  const sorted = key ? [...rows].sort(compare) : rows;
  return { total: rows.length, rows: sorted.slice(start, start + query.size) };
}

function grouped(samples) {
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.file} ${sample.group_id}`;
    groups.set(key, [...(groups.get(key) || []), sample]);
  }
  return [...groups.values()].map((members) => {
    const rewards = members.map((sample) => sample.reward).filter((reward) => reward != null);
    const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
    const reward = mean(rewards);
    const { file, group_id, prompt, label, datasource } = members[0];
    return {
      file, group_id, prompt, label, datasource, num_samples: members.length, reward,
      reward_std: rewards.length > 1 ? Math.sqrt(rewards.reduce((sum, r) => sum + (r - reward) ** 2, 0) / (rewards.length - 1)) : null,
      reward_min: rewards.length ? Math.min(...rewards) : null, reward_max: rewards.length ? Math.max(...rewards) : null,
      num_actions: mean(members.map((sample) => sample.num_actions).filter((length) => length != null)),
    };
  });
}

const source = data.is_served
  ? { samples: (query) => fetched("samples", query), groups: (query) => fetched("groups", query), sample: (place) => fetched("sample", place) }
  : {
    samples: async (query) => page(matching(query), query),
    groups: async (query) => page(grouped(matching(query)), query),
    sample: async ({ run, file, number }) => data.runs[run].samples.find((s) => s.file === file && s.number === number),
  };

const fixed = (cell) => number(cell.getValue());
const TEXT = { widthGrow: 3, minWidth: 160 };
const NUMBER = { hozAlign: "right", formatter: fixed, minWidth: 100 };
const VIEWS = {
  groups: [
    { title: "prompt", field: "prompt", ...TEXT }, { title: "label", field: "label" }, { title: "source", field: "datasource" },
    { title: "samples", field: "num_samples", ...NUMBER }, { title: "reward", field: "reward", ...NUMBER },
    { title: "spread", field: "reward_std", ...NUMBER }, { title: "least", field: "reward_min", ...NUMBER },
    { title: "most", field: "reward_max", ...NUMBER }, { title: "length", field: "num_actions", ...NUMBER },
  ],
  samples: [
    { title: "prompt", field: "prompt", ...TEXT }, { title: "response", field: "response", ...TEXT }, { title: "label", field: "label" },
    { title: "reward", field: "reward", ...NUMBER }, { title: "advantage", field: "advantage", ...NUMBER, minWidth: 125 },
    { title: "length", field: "num_actions", ...NUMBER }, { title: "end", field: "finish_reason" },
    { title: "source", field: "datasource" },
  ],
};
const form = find("#query");
let table = null;
let group = null; // the prompt whose samples are shown
const newest = { page: 0, sample: 0 }; // of several questions the last is shown

function stepOf(file) {
  const [, evaluation, step] = file.match(/^(eval_)?step_(\d+)/);
  return (evaluation ? "eval " : "") + Number(step);
}

async function ask(_url, _config, params) {
  const mine = ++newest.page;
  const view = group ? "samples" : form.view.value;
  const [sorter] = params.sort || [];
  const query = {
    run: Number(form.run.value), file: group ? group.file : form.file.value, group_id: group ? group.group_id : null,
    search: form.search.value, sort: sorter ? sorter.field : null, is_descending: sorter ? sorter.dir === "desc" : null,
    page: params.page, size: params.size,
  };
  const found = await source[view](query);
  if (mine !== newest.page) return new Promise(() => {}); // the table has asked again
  return { data: found.rows, last_page: Math.max(1, Math.ceil(found.total / params.size)), last_row: found.total };
}

function showTable() {
  const view = group ? "samples" : form.view.value;
  const run = data.runs[form.run.value];
  find("#all-prompts").hidden = !group;
  find("#left-out").textContent = data.is_served ? `${run.num_samples} samples.` : leftOut(run);
  find("#sample").hidden = true;
  newest.page += 1;
  if (table) table.destroy();
  const step = { title: "step", field: "file", minWidth: 70, formatter: (cell) => stepOf(cell.getValue()) };
  table = new Tabulator("#table", {
    columns: [...(form.file.value || group ? [] : [step]), ...VIEWS[view]], layout: "fitColumns", minHeight: 80,
    ajaxURL: "samples", ajaxRequestFunc: ask, sortMode: "remote", pagination: true, paginationMode: "remote",
    paginationSize: 20, paginationSizeSelector: [20, 50, 100], paginationCounter: "rows", dataLoader: false, placeholder: "No samples.",
  });
  table.on("rowClick", (_event, row) => {
    const chosen = row.getData();
    if (view === "groups") {
      group = chosen;
      showTable();
    } else {
      for (const other of table.getRows()) other.getElement().classList.toggle("chosen", other === row);
      showSample(chosen);
    }
  });
}

function leftOut(run) {
  const missing = run.num_samples - run.samples.length;
  if (!run.num_samples) return "This run kept no samples.";
  return missing
    ? `${run.samples.length} of ${run.num_samples} samples are in this file; ${missing} are left out. All: openrlhf report ${quoted(run.path)} --serve`
    : `All ${run.num_samples} samples.`;
}

function fillFiles() {
  const run = data.runs[form.run.value];
  form.file.replaceChildren();
  element("option", "all", form.file).value = "";
  const inPage = new Set(run.samples.map((sample) => sample.file));
  const files = run.files.filter((file) => data.is_served || inPage.has(file.name));
  for (const file of files) element("option", file.label, form.file).value = file.name;
  const last = files.findLast((file) => !file.name.startsWith("eval_")) || files.at(-1);
  form.file.value = last ? last.name : "";
}

// ---- one sample and its tokens

const RATIO = (t, i) => (t.new_logprobs && t.old_logprobs ? Math.exp(t.new_logprobs[i] - t.old_logprobs[i]) : null);
const TRAINER = (t) => t.old_logprobs || t.new_logprobs; // without old ones the update is on-policy
const MISMATCH = (t, i) => (t.logprobs && TRAINER(t) ? t.logprobs[i] - TRAINER(t)[i] : null);
let shown = null; // sample, and for each token its numbers

function tokenFacts(tokens) {
  let action = -1;
  return tokens.token_texts.map((text, place) => {
    const sampled = tokens.action_mask ? tokens.action_mask[place] : false;
    if (!sampled) return { place, text, action_mask: 0 };
    action += 1;
    const at = (name) => (tokens[name] ? tokens[name][action] : null);
    return {
      place, text, action_mask: 1, advantages: at("advantages"), ratio: RATIO(tokens, action), mismatch: MISMATCH(tokens, action),
      logprobs: at("logprobs"), old_logprobs: at("old_logprobs"), new_logprobs: at("new_logprobs"), weight_versions: at("weight_versions"),
    };
  });
}

async function showSample(place) {
  const mine = ++newest.sample;
  const sample = await source.sample({ run: Number(form.run.value), file: place.file, number: place.number });
  if (mine !== newest.sample) return;
  shown = { sample, tokens: sample.tokens ? tokenFacts(sample.tokens) : null };
  find("#sample").hidden = false;
  find("#sample h2").textContent = `Sample ${sample.sample_id ?? sample.number}, ${stepOf(sample.file).replace(/^(\d)/, "step $1")}`;
  const facts = find("#sample table");
  facts.replaceChildren();
  const values = {
    prompt: sample.prompt, response: sample.response, label: sample.label, reward: sample.reward, ...prefixed("reward: ", sample.parts),
    score: sample.score, advantage: sample.advantage, "sampled tokens": sample.num_actions, end: sample.finish_reason,
    source: sample.datasource, row: sample.row, "weight version": sample.weight_version, ...sample.others,
  };
  for (const [name, value] of Object.entries(values)) {
    if (value == null || value === "") continue;
    const row = element("tr", null, facts);
    element("th", name, row);
    element("td", typeof value === "object" ? JSON.stringify(value) : value, row);
  }
  find("#colours").hidden = !shown.tokens;
  find("#token").textContent = shown.tokens ? "Point at a token for its numbers." : "The file of this step has no tokens.";
  colourTokens();
  find("#sample").scrollIntoView({ block: "nearest" });
}

const prefixed = (prefix, values) => Object.fromEntries(Object.entries(values || {}).map(([name, value]) => [prefix + name, value]));

// How a number becomes a colour: around a middle (blue below, red above), or one of a few. The third
// entry is the least reach of the scale, so that rounding noise stays white.
const DIVERGING = {
  advantages: [0, (v) => v, 0], ratio: [1, (v) => Math.log(v), Math.log(1.01)], mismatch: [0, (v) => v, 0.01],
};
const PALETTE = ["#fff3b0", "#c7e9c0", "#c6dbef", "#fdd0a2", "#dadaeb", "#f7c6d9"];
const shade = (part) => (part < 0 ? `rgba(31, 111, 235, ${-part * 0.75})` : `rgba(218, 54, 51, ${part * 0.75})`);

function colourTokens() {
  const [box, scale, tokens] = [find("#tokens"), find("#scale"), shown.tokens];
  box.replaceChildren();
  scale.replaceChildren();
  box.hidden = !tokens;
  if (!tokens) return;
  const name = find("#colours").colour.value;
  const known = tokens.map((token) => token[name]).filter((value) => value != null);
  const colourOf = !known.length ? () => "" : DIVERGING[name] ? diverging(name, known, scale) : listed(known, scale);
  if (!known.length) scale.textContent = "The file of this step does not have these numbers.";
  for (const token of tokens) {
    const span = element("span", token.text.replace(/\n/g, "⏎\n"), box, token.action_mask ? "" : "not-sampled");
    span.dataset.place = token.place;
    if (token[name] != null) span.style.background = colourOf(token[name]);
  }
}

function diverging(name, known, scale) {
  const [middle, on, least] = DIVERGING[name];
  const reach = Math.max(least, ...known.map((value) => Math.abs(on(value)))) || 1;
  const ends = name === "ratio" ? [Math.exp(-reach), Math.exp(reach)] : [-reach, reach];
  element("span", number(ends[0]), scale);
  element("i", null, scale).style.background = `linear-gradient(to right, ${shade(-1)}, #fff, ${shade(1)})`;
  element("span", `${number(ends[1])} (white: ${middle})`, scale);
  return (value) => shade(on(value) / reach);
}

function listed(known, scale) {
  const values = [...new Set(known)].sort((a, b) => a - b);
  const colour = (value) => PALETTE[values.indexOf(value) % PALETTE.length];
  const isMask = find("#colours").colour.value === "action_mask";
  for (const value of values) {
    element("i", null, scale, "key").style.background = colour(value);
    element("span", isMask ? ["not trained on", "sampled, trained on"][value] : value, scale);
  }
  return colour;
}

function describe(event) {
  const token = shown.tokens[event.target.dataset.place];
  if (!token) return;
  const ids = shown.sample.tokens.token_ids;
  const numbers = [["advantage", token.advantages], ["ratio", token.ratio], ["engine − trainer", token.mismatch], ["log-prob engine", token.logprobs],
    ["old", token.old_logprobs], ["new", token.new_logprobs], ["weight version", token.weight_versions]];
  find("#token").textContent = [
    `token ${token.place + 1} ${JSON.stringify(token.text)}`, ...(ids ? [`id ${ids[token.place]}`] : []), token.action_mask ? "sampled" : "not sampled",
    ...numbers.filter(([, value]) => value != null).map(([name, value]) => `${name} ${number(value)}`),
  ].join(" · ");
}

// ---- the views; each is drawn when it is first seen

const DRAW = {
  overview: drawHints,
  curves: () => { drawPanels("curves"); find("#view-curves details").addEventListener("toggle", () => drawPanels("others"), { once: true }); },
  time: () => { drawTimes(); drawPanels("time"); },
  samples: () => { fillFiles(); showTable(); },
  settings: () => {},
};
const drawn = new Set();

function showView() {
  const name = location.hash.slice(1) in DRAW ? location.hash.slice(1) : "overview";
  for (const section of document.querySelectorAll("section")) section.hidden = section.id !== `view-${name}`;
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("current", link.hash === `#${name}`);
  if (!drawn.has(name)) DRAW[name]();
  drawn.add(name);
  scrollTo(0, 0);
}

data.runs.forEach((run, index) => { element("option", run.name, form.run).value = index; });
form.run.parentElement.hidden = data.runs.length < 2;
find("#view-curves details").hidden = !data.panels.some((panel) => panel.section === "others");
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", (event) => {
  if (event.target.name === "search") return;
  group = null;
  if (event.target.name === "run") fillFiles();
  showTable();
});
form.search.addEventListener("input", () => {
  clearTimeout(form.waiting);
  form.waiting = setTimeout(() => table.setPage(1), 200);
});
find("#all-prompts").addEventListener("click", () => { group = null; showTable(); });
find("#colours").addEventListener("change", colourTokens);
find("#tokens").addEventListener("mouseover", describe);
const same = find("#same");
if (same) same.addEventListener("change", () => find("#view-settings table").classList.toggle("all", same.checked));
addEventListener("hashchange", showView);
showView();
