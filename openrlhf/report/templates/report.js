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

// ---- charts: each is made anew when its view is shown, or the axis, the smoothing or the theme changes

const LAST_STEP = Math.max(...data.runs.map((run) => run.last_step));
const axes = find("#axes");
const NOISY_FROM = 50; // steps
axes.smoothing.value = LAST_STEP < NOISY_FROM ? 0 : 0.6;
const LONGEST = Math.max(0, ...data.runs.flatMap((run) => Object.values(run.seconds)));
const [UNIT, NUM_SECONDS] = LONGEST > 10800 ? ["hours", 3600] : LONGEST > 180 ? ["minutes", 60] : ["seconds", 1];
const charts = []; // { place, make }

function layoutOf(own) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name));
  const isTime = axes.axis.value === "time";
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line };
  const steps = { title: { text: "step", standoff: 4 }, dtick: LAST_STEP < 10 ? 1 : undefined }; // no half steps
  return {
    height: 260, margin: { l: 50, r: 15, t: 10, b: 35 }, font: { size: 11, color: ink }, hovermode: "x unified",
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", legend: { orientation: "h", y: -0.22, yanchor: "top" },
    hoverlabel: { bgcolor: style.getPropertyValue("--raised"), font: { color: ink } }, ...own,
    xaxis: { ...axis, ...(isTime && !own.isSteps ? { title: { text: UNIT, standoff: 4 } } : steps) },
    yaxis: { ...axis, exponentformat: "e", ...own.yaxis },
  };
}

function drawChart({ place, make }) {
  const [traces, layout] = make();
  Plotly.react(place, traces, layoutOf(layout), { displayModeBar: false, responsive: true });
}

function drawCharts() {
  axes.querySelector("output").textContent = Number(axes.smoothing.value).toFixed(2);
  for (const chart of charts) if (chart.place.offsetParent) drawChart(chart);
}

function addChart(parent, make) {
  charts.push({ place: element("div", null, parent), make });
}

// An exponential mean: its first values are means of the few that there are.
function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value == null) return null;
    [sum, mass] = [weight * sum + (1 - weight) * value, weight * mass + 1 - weight];
    return sum / mass;
  });
}

function tracesOf(panel) {
  const metrics = [...new Set(panel.curves.map((curve) => curve.metric))];
  const weight = Number(axes.smoothing.value);
  return panel.curves.flatMap((curve) => {
    const index = data.runs.findIndex((run) => run.name === curve.run);
    const names = [...(data.runs.length > 1 ? [curve.run] : []), ...(metrics.length > 1 ? [curve.metric] : [])];
    // Several runs: a colour for each, a dash for each metric. One run: a colour for each metric.
    const [hue, dash] = data.runs.length > 1 ? [index, metrics.indexOf(curve.metric)] : [metrics.indexOf(curve.metric), 0];
    const { seconds } = data.runs[index];
    const trace = {
      x: axes.axis.value === "time" ? curve.steps.map((step) => seconds[step] / NUM_SECONDS) : curve.steps,
      y: curve.values, name: escaped(names.join(" ") || curve.metric), legendgroup: `${curve.run} ${curve.metric}`,
      mode: curve.is_evaluation || curve.steps.length < 3 ? "lines+markers" : "lines",
      line: { color: COLOURS[hue % COLOURS.length], width: 1.6, dash: ["solid", "dot", "dash", "dashdot"][dash % 4] },
      error_y: curve.errors ? { array: curve.errors, visible: true, thickness: 1 } : undefined,
    };
    if (!weight || trace.mode !== "lines") return [trace];
    return [{ ...trace, opacity: 0.3, showlegend: false, hoverinfo: "skip" }, { ...trace, y: smoothed(curve.values, weight) }];
  });
}

function drawPanel(panel, parent) {
  const box = element("div", null, parent, "panel");
  element("h2", panel.title, box);
  element("p", panel.meaning, box);
  const names = new Set(panel.curves.map((curve) => `${curve.run} ${curve.metric}`));
  addChart(box, () => [tracesOf(panel), { showlegend: names.size > 1 }]);
}

function drawPanels(section) {
  const parent = find(`.panels[data-section="${section}"]`);
  const panels = section === "main"
    ? data.main.map((title) => data.panels.find((panel) => panel.title === title))
    : data.panels.filter((panel) => panel.section === section);
  for (const panel of panels) drawPanel(panel, parent);
  if (section === "curves" && !data.panels.length) element("p", "No step was logged.", parent);
}

function drawTimes() {
  const parent = find("#times");
  for (const times of data.times) {
    element("h2", times.run, parent);
    const phases = Object.entries(times.phases);
    const bars = phases.map(([name, seconds], index) => (
      { type: "bar", x: times.steps, y: seconds, name: escaped(name.replaceAll("_", " ")), marker: { color: COLOURS[index % COLOURS.length] } }
    ));
    const total = { x: times.steps, y: times.total, name: "step", mode: "lines", line: { color: "#8b98a5", width: 1.5 } };
    const yaxis = { title: { text: "seconds" }, rangemode: "tozero" };
    addChart(parent, () => [[...bars, total], { barmode: "stack", bargap: 0.1, height: 320, yaxis, isSteps: true }]);
  }
  if (!data.times.length) element("p", "No times were logged.", parent);
}

// ---- samples: a server answers, or the excerpt in the page does, in the same words

async function fetched(path, values) {
  const asked = { ...values, run: data.runs[values.run].path };
  const given = Object.entries(asked).filter(([, value]) => value != null && value !== "");
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
  const short = shortener(found.rows.map((row) => row.prompt || ""));
  const rows = found.rows.map((row) => ({ ...row, prompt: group ? group.prompt : short(row.prompt || "") }));
  return { data: rows, last_page: Math.max(1, Math.ceil(found.total / params.size)), last_row: found.total };
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

function filesOf(run) {
  const { files, samples } = data.runs[run];
  const inPage = new Set(samples.map((sample) => sample.file));
  return files.filter((file) => data.is_served || inPage.has(file.name));
}

function fillFiles() {
  const files = filesOf(form.run.value);
  form.file.replaceChildren();
  element("option", "all", form.file).value = "";
  for (const file of files) element("option", file.label, form.file).value = file.name;
  const last = files.findLast((file) => !file.name.startsWith("eval_")) || files.at(-1);
  form.file.value = last ? last.name : "";
}

// ---- the best and the worst samples of the latest evaluation, or else of the last step

const NUM_READ = 50; // of each end, to find some of different prompts
const NUM_CARDS = 3;

async function showExtremes() {
  for (const [run, { name, path }] of data.runs.entries()) {
    const file = filesOf(run).at(-1);
    if (!file) continue;
    const ask = (is_descending) => source.samples({ run, file: file.name, sort: "reward", is_descending, page: 1, size: NUM_READ });
    const [best, worst] = (await Promise.all([ask(true), ask(false)])).map((found) => found.rows.filter((row) => row.reward != null));
    if (!best.length) continue;
    const parent = find("#extremes");
    const where = `${file.label.replace(/ \(.*/, "")}${data.runs.length > 1 ? ` of ${name}` : ""}`;
    const areEqual = best[0].reward === worst[0].reward;
    element("h2", areEqual ? `Samples of ${where}: all have the same reward` : `Best and worst samples of ${where}`, parent);
    const columns = element("div", null, parent, "cards");
    const [chosenBest, chosenWorst] = [best, worst].map(ofDifferentPrompts);
    const short = shortener([...chosenBest, ...chosenWorst].map((row) => row.prompt || ""));
    for (const [title, rows] of areEqual ? [["", chosenBest]] : [["best", chosenBest], ["worst", chosenWorst]]) {
      const column = element("div", null, columns);
      if (title) element("h3", title, column);
      for (const row of rows) addCard(row, run, short, column);
    }
  }
}

function ofDifferentPrompts(rows) {
  const byGroup = new Map(rows.toReversed().map((row) => [row.group_id, row]));
  const firsts = rows.filter((row) => byGroup.get(row.group_id) === row);
  return firsts.slice(0, NUM_CARDS);
}

// Without the lines and tags that all prompts begin and end with, such as a system's turn.
function shortener(prompts) {
  if (new Set(prompts).size < 2) return (prompt) => prompt.trim();
  const [least, most] = [prompts.reduce((a, b) => (a < b ? a : b)), prompts.reduce((a, b) => (a > b ? a : b))];
  let head = 0;
  while (least[head] === most[head]) head += 1;
  head = least.slice(0, head).search(/[^\n>]*$/);
  let tail = 0;
  while (prompts.every((prompt) => tail < prompt.length - head && prompt.at(-1 - tail) === least.at(-1 - tail))) tail += 1;
  const end = least.slice(least.length - tail).search(/[<\n]/);
  const cut = end < 0 ? 0 : tail - end;
  return (prompt) => `${head ? "…" : ""}${prompt.slice(head, prompt.length - cut).trim()}`;
}

function addCard(row, run, short, parent) {
  const card = element("button", null, parent, "card");
  const facts = [row.label != null ? `label ${row.label}` : "", row.num_actions != null ? `${row.num_actions} tokens` : "", row.finish_reason || ""];
  element("b", `reward ${number(row.reward)}`, card);
  element("span", facts.filter(Boolean).join(" · "), card);
  element("p", short(row.prompt || ""), card, "prompt");
  element("p", row.response || "(empty)", card, "response");
  card.addEventListener("click", () => openSample(run, row));
}

function openSample(run, row) {
  addEventListener("hashchange", () => {
    form.run.value = run;
    fillFiles();
    form.file.value = row.file;
    form.view.value = "samples";
    group = null;
    showTable();
    showSample(row);
  }, { once: true });
  location.hash = "samples";
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
  showImages(sample.images || []);
  find("#colours").hidden = !shown.tokens;
  find("#token").textContent = shown.tokens ? "Point at a token for its numbers." : "The file of this step has no tokens.";
  colourTokens();
  find("#sample").scrollIntoView({ block: "nearest" });
}

function showImages(images) {
  const box = find("#images");
  box.replaceChildren();
  for (const image of images) {
    const figure = element("figure", null, box);
    if (image.src) Object.assign(element("img", null, figure), { src: image.src, alt: "" });
    element("figcaption", image.words, figure);
  }
}

const prefixed = (prefix, values) => Object.fromEntries(Object.entries(values || {}).map(([name, value]) => [prefix + name, value]));

// How a number becomes a colour: around a middle (blue below, red above), or one of a few. The third
// entry is the least reach of the scale, so that rounding noise stays white.
const DIVERGING = {
  advantages: [0, (v) => v, 0], ratio: [1, (v) => Math.log(v), Math.log(1.01)], mismatch: [0, (v) => v, 0.01],
};
const PALETTE = ["250, 204, 21", "34, 160, 70", "31, 111, 235", "240, 120, 20", "130, 80, 223", "220, 60, 130"].map((c) => `rgba(${c}, 0.3)`);
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
  const images = shown.sample.images || [];
  for (const token of tokens) {
    const image = images.find(({ start, num_tokens }) => start <= token.place && token.place < start + num_tokens);
    if (image && token.place > image.start) continue;
    const text = image ? image.words : token.text.replace(/\n/g, "⏎\n");
    const span = element("span", text, box, token.action_mask ? "" : "not-sampled");
    span.dataset.place = token.place;
    if (token[name] != null) span.style.background = colourOf(token[name]);
  }
}

function diverging(name, known, scale) {
  const [middle, on, least] = DIVERGING[name];
  const reach = Math.max(least, ...known.map((value) => Math.abs(on(value)))) || 1;
  const ends = name === "ratio" ? [Math.exp(-reach), Math.exp(reach)] : [-reach, reach];
  element("span", number(ends[0]), scale);
  element("i", null, scale).style.background = `linear-gradient(to right, ${shade(-1)}, transparent, ${shade(1)})`;
  element("span", `${number(ends[1])} (no colour: ${middle})`, scale);
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
  overview: () => { drawPanels("main"); showExtremes(); },
  curves: () => { drawPanels("curves"); drawPanels("others"); },
  time: () => { drawTimes(); drawPanels("time"); },
  samples: () => { fillFiles(); showTable(); },
  settings: filterSettings,
};
const drawn = new Set();

function filterSettings() {
  const { text, which } = find("#filter");
  const rows = [...document.querySelectorAll("tr.setting")];
  for (const row of rows) {
    const words = `${row.dataset.names} ${row.textContent}`.toLowerCase();
    const isFound = text.value.toLowerCase().replaceAll("--", "").split(/\s+/).every((word) => words.includes(word));
    row.hidden = !isFound || (which.value !== "all" && !row.classList.contains(which.value));
  }
  find("#num-settings").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} settings`;
}

function showView() {
  const name = location.hash.slice(1) in DRAW ? location.hash.slice(1) : "overview";
  for (const section of document.querySelectorAll("section")) section.hidden = section.id !== `view-${name}`;
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("current", link.hash === `#${name}`);
  if (!drawn.has(name)) DRAW[name]();
  drawn.add(name);
  axes.hidden = !(name === "overview" ? data.main.length : name === "curves" && data.panels.length);
  drawCharts();
  scrollTo(0, 0);
}

data.runs.forEach((run, index) => { element("option", run.name, form.run).value = index; });
form.run.parentElement.hidden = data.runs.length < 2;
find("#view-curves details").hidden = !data.panels.some((panel) => panel.section === "others");
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
find("#filter").addEventListener("input", filterSettings);
axes.addEventListener("input", drawCharts);
find("#view-curves details").addEventListener("toggle", drawCharts);
for (const own of [form, axes, find("#filter")]) own.addEventListener("submit", (event) => event.preventDefault());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
addEventListener("hashchange", showView);
showView();
