// Draws the pictures of the report and handles pointer and keys. The address keeps the state {slot, look, metric}, so
// that a link can point at a cell: report.html#slot=3&metric=underflow_pct&step=40. The numbers are in #numbers, and
// the JSON in #facts explains them, see page.py. chart.js draws.
// root: what stands before every id of this run, and nth: its number, where a page has several.
async function show(kept = {}, root = "", nth) {
const $ = (id) => document.getElementById(root + id), page = document.getElementById(root.slice(0, -1)) ?? document;
const leaving = new AbortController(), until = { signal: leaving.signal };
const told = JSON.parse(new TextDecoder().decode(await inflate(document.getElementById("facts").textContent)));
const facts = nth === undefined ? told  // several runs: of each name its values, and for each run which
  : Object.fromEntries(Object.entries(told).map(([name, [values, at]]) => [name, values[at[nth]]]));
const { slots, groups, looks, metrics, formats, events } = facts;
const metricAt = Object.fromEntries(metrics.map((metric, i) => [metric.name, i]));

// ---- numbers ------------------------------------------------------------------------------------------------------

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}
const INFINITE = 2 ** 29, UNKNOWN = 2 ** 30;
// A code is a whole number, or one of `digits` decimal digits and a power of ten.
function decoded(code, digits) {
  const size = Math.abs(code), first = 10 ** (digits - 1);
  if (size >= INFINITE) return size === UNKNOWN ? NaN : code > 0 ? Infinity : -Infinity;
  if (!digits || !code) return code;
  return Math.sign(code) * Number(`${(size - 1) % (9 * first) + first}e${Math.floor((size - 1) / (9 * first)) - 309 - digits}`);
}
async function unpack(text) {
  const planes = await inflate(text), count = planes.length / 4, values = new Float64Array(count);
  let at = 0;
  for (const [length, digits] of facts.kinds) for (const end = at + length; at < end; at++) {
    const code = planes[at] << 24 | planes[count + at] << 16 | planes[2 * count + at] << 8 | planes[3 * count + at];
    values[at] = decoded(code, digits);
  }
  return values;
}
const numbers = await unpack($("numbers").textContent);
// A number of a grid: that of this run, of its light rows, or of the good run; the step is -1 where no look is.
const read = ({ starts, firsts }, name, row, look) => name in starts && row >= 0 ? numbers[starts[name] + row * firsts.length + look] : NaN;
const stepIn = (grid, row, look) => read(grid, "step", row, look) < 0 ? -1 : grid.firsts[look] + read(grid, "step", row, look);
const named = (name, slot, look) => read(facts.own, name, slot, look);
const valueAt = (metric, slot, look) => metric === undefined ? NaN : named(metrics[metric].name, slot, look);
const stepAt = (slot, look) => stepIn(facts.own, slot, look);

function unfold(entries, offset) {
  return entries.map(([slot, look, ...bins]) => {
    const [exponents, rows, spread] = [0, 2, 4].map((i) => {
      const counts = numbers.subarray(offset, offset + bins[i + 1]);
      offset += bins[i + 1];
      return { first: bins[i], counts };
    });
    return { slot, look, exponents, rows, spread };
  });
}
const histograms = unfold(facts.histograms, facts.counts), goods = unfold(facts.good?.histograms ?? [], facts.good?.counts);
// The good run's last histogram of a cast up to a look; none beside one that it has not.
const goodFor = ({ slot, look }) => goods.findLast((h) => h.slot === facts.good.slots[slot] && facts.good.firsts[h.look] <= looks[look][1]);

// The level of a value between calm (0) and alarming (1); null if unknown.
function level(metric, slot, value) {
  const { calm, alarm, log, below } = metrics[metric], floor = facts.floor[slot];
  if (Number.isNaN(value) || (below && floor === null)) return null;
  const f = log ? (x) => Math.log10(Math.max(x, 1e-300)) : (x) => x;
  return clamp((f(below ? floor - value : value) - f(calm)) / (f(alarm) - f(calm) || 1), 0, 1);
}
const shade = (share) => Math.min(8, Math.floor(share * 9));
const castKey = (slot) => [slot.recipe, slot.direction, slot.source].join("|");
const castOf = (slot) => `${slot.recipe} ${slot.format}${slot.granularity ? `[${slot.granularity}]` : ""}`
  + (slot.direction === "col" ? " of the transpose" : "") + (slot.source === "hook" ? ", simulated" : "");
const nameOf = (slot) => `${slots[slot].symbol} of ${slots[slot].layer}`;

// ---- loss, gradient norm, events, worst tensor of each look -------------------------------------------------------

// All pictures above each other share this axis: `view` is the part of all steps that is shown.
const MARGIN = { left: 56, right: 14 };
const curves = [[facts.loss.loss, "s1"], [facts.loss.grad_norm, "s3"]], { experiment } = facts;
const steps = [...curves.flatMap(([[xs]]) => xs), ...experiment.steps, ...looks.flat()];
let whole = [steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), -Infinity)];
let view = kept.view ?? whole;
const spread = (ys, most) => {  // whether a linear axis would flatten most of a curve
  const v = ys.filter((y) => y > 0).sort((a, b) => a - b);
  return v.length > 0 && v.at(-1) > most * v[v.length >> 1];
};
const inView = ({ xs, ys, ...rest }) => {
  const seen = xs.map((x) => x >= view[0] && x <= view[1]);
  return { ...rest, xs: xs.filter((_, i) => seen[i]), ys: ys.filter((_, i) => seen[i]) };
};
const lossCurves = () => {
  const [xs, ys] = facts.loss.loss, [gx, gy] = facts.baseline?.loss ?? [[], []];
  const good = { name: "loss of the good run", xs: gx, ys: gy, css: "faint" };
  return [...(gx.length ? [good] : []), { name: "loss", xs, ys, css: "s1" }].map(inView).filter((s) => s.xs.length);
};
function drawTime() {
  if (!steps.length) return;
  const shown = events.filter((event) => !event.quiet && event.step >= view[0] && event.step <= view[1]), at = { x: view, ...MARGIN };
  if (facts.loss.loss[0].length) {
    const size = { height: 260, top: 46, bottom: 8 }, log = $("log").checked;
    const frame = lines($("loss"), { ...size, label: "Loss by step", series: lossCurves(), log, ...at });
    drawEvents(frame, shown);
    const lost = facts.loss.not_finite_from, place = { class: "alert", x: Math.min(frame.X(lost ?? 0), frame.width - 150), y: 250 };
    if (lost !== null && lost >= view[0] && lost <= view[1]) put(frame.svg, "text", place, "✕ no finite loss from here");
    brush(frame);
  }
  const [xs, ys] = facts.loss.grad_norm, [gx, gy] = facts.baseline?.grad_norm ?? [[], []];
  const norms = [{ name: "gradient norm", xs, ys, css: "s3" }];
  if (gx.length) norms.unshift({ name: "gradient norm of the good run", xs: gx, ys: gy, css: "faint" });
  const tall = { height: 120 + 15 * norms.length, label: "Gradient norm by step", bottom: 8, top: 28 };
  if (xs.length) brush(lines($("norm"), { ...tall, series: norms.map(inView), log: spread([...ys, ...gy], 4), ...at }));
  if (experiment.steps.length) {
    const { error, noise } = experiment, beside = facts.baseline?.experiment;
    const all = [...error, ...noise, ...(beside?.error ?? [])], own = { log: spread(all, 4), height: 150, top: 30, bottom: 8 };
    const series = [
      { name: "noise of the batch, %", xs: experiment.steps, ys: noise, css: "faint" },
      { name: "error of the gradient by the casts, %", xs: experiment.steps, ys: error, css: "s2" },
    ];
    if (beside?.steps.length) series.unshift({ name: "the same in the good run, %", xs: beside.steps, ys: beside.error, css: "s3" });
    brush(lines($("experiment"), { ...own, label: "What the casts did to the gradient, by step", series: series.map(inView), dots: true, ...at }));
  }
  if (looks.length) drawStrip();
}
function zoom(range) {
  view = [Math.max(range[0], whole[0]), Math.min(range[1], whole[1])];
  if (!(view[1] > view[0])) view = whole;
  [$("from").value, $("to").value] = view;
  $("all-steps").hidden = view[0] === whole[0] && view[1] === whole[1];
  drawTime();
  if (state) drawHeat();
}
// Dragging over a picture of the time axis shows these steps alone.
const brush = ({ svg, left, right, width, top, base }) => brushed(svg, { left, right: width - right, top, bottom: base }, (shares) => {
  zoom(shares.map((share) => Math.round(view[0] + share * (view[1] - view[0]))));
});
function drawEvents({ svg, X, top, base }, shown) {
  const places = Map.groupBy ? Map.groupBy(shown, (event) => Math.round(X(event.step) / 20)) : new Map(shown.map((event) => [event, [event]]));
  for (const here of places.values()) {
    const x = X(here[0].step), mark = put(svg, "g", { class: "event" });
    put(mark, "line", { x1: x, x2: x, y1: top - 4, y2: base });
    put(mark, "circle", { cx: x, cy: top - 13, r: 9 });
    put(mark, "text", { x, y: top - 9, "text-anchor": "middle" }, here.length > 1 ? here.length : here[0].letter);
    put(mark, "title", {}, here.map((event) => `step ${event.step}: ${event.kind}, ${event.text}`).join("\n"));
  }
}
// Left and right edge of a look on an axis of steps: half-way to its neighbours, at most a usual gap.
function edges(look) {
  const middle = ([first, last]) => (first + last) / 2, here = middle(looks[look]), count = looks.length;
  const usual = count > 1 ? (middle(looks[count - 1]) - middle(looks[0])) / (count - 1) : 1;
  const gap = (other) => Math.min(looks[other] ? Math.abs(middle(looks[other]) - here) : usual, 2 * usual) / 2;
  return [here - gap(look - 1), here + gap(look + 1)];
}
function drawStrip() {
  const { svg, width } = canvas($("strip"), 66, "Each look: how many tensors are alarming (height), and how alarming the worst one is (colour)"), [x0, x1] = view;
  const { left, right } = MARGIN, X = (x) => clamp(left + (x - x0) / (x1 - x0) * (width - left - right), left, width - right);
  const title = put(svg, "text", { x: left, y: 12, class: "name" }, "alarming tensors of each look");
  for (const [y, text] of [[18, "all"], [46, "none"]]) put(svg, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, text);
  put(svg, "line", { class: "grid", x1: left, x2: width - right, y1: 46, y2: 46 });
  const cells = facts.worst.map((worst, look) => {
    const [a, b] = x1 > x0 ? edges(look).map(X) : [left, width - right];
    if (b <= left || a >= width - right) return [NaN, NaN];
    const high = worst ? Math.max(3, 28 * worst[4]) : 0;
    if (worst) put(svg, "rect", { class: `h${shade(clamp(worst[3] ?? 1, 0, 1))}`, x: a, width: Math.max(1.5, b - a), y: 46 - high, height: high });
    return [a, b];
  });
  const good = (facts.good?.alarming ?? []).map((share, i) => [facts.good.firsts[i], share]).filter(([step]) => step >= x0 && step <= x1);
  if (good.length) {
    const from = left + title.getComputedTextLength() + 24, path = good.map(([step, share], i) => `${i ? "L" : "M"}${X(step).toFixed(1)} ${(46 - 28 * share).toFixed(1)}`);
    put(svg, "path", { class: "curve faint", d: `M${from} 8h20` });
    put(svg, "text", { x: from + 26, y: 12, class: "name" }, width > 600 ? "the good run" : "");
    put(svg, "path", { class: "curve faint", d: path.join("") });
  }
  const goodAt = (look) => good.reduce((best, [step, share]) => step <= looks[look][1] ? share : best, null);
  put(svg, "text", { x: left - 8, y: 62, "text-anchor": "end" }, "step");
  for (const x of x1 > x0 ? wholeTicks(x0, x1, Math.max(3, width / 110)) : []) {
    put(svg, "text", { x: X(x), y: 62, "text-anchor": "middle" }, plain(x));
  }
  const lookAt = (px) => cells.findIndex(([a, b]) => px >= a && px <= b);
  crossed(svg, "step", { left, right: width - right, top: 16, bottom: 48, low: x0, high: x1 });
  hover(svg, (px) => {
    const look = lookAt(px), worst = facts.worst[look];
    pointAt("step", look < 0 ? null : looks[look][0]);
    if (!worst) return null;
    const [slot, name, value, , share] = worst, beside = goodAt(look);
    return [...(beside === null ? [] : [`the good run: ${human(100 * beside, "%")}`]), `step ${plain(stepAt(slot, look))}: ${human(100 * share, "%")} of the tensors are alarming`, `the worst: ${nameOf(slot)}`, `${name} ${human(value, metrics[metricAt[name]].unit)}`];
  });
  svg.addEventListener("click", (event) => {
    const look = lookAt(pointIn(svg, event).x), worst = facts.worst[look];
    if (worst) select({ slot: worst[0], look, metric: metricAt[worst[1]] });
  });
}

// ---- heat map -----------------------------------------------------------------------------------------------------

let state, heatRows = [];
// One cast for each layer: that of the selected cell, or else the one most like it.
function castsShown() {
  const chosen = slots[state.slot], best = new Map();
  slots.forEach((slot, i) => {
    if (slot.tensor !== chosen.tensor) return;
    const alike = (i === state.slot) * 8 + (castKey(slot) === castKey(chosen)) * 4 + (slot.direction === chosen.direction) * 2 + (slot.source === chosen.source);
    if (!best.has(slot.layer) || alike > best.get(slot.layer)[1]) best.set(slot.layer, [i, alike]);
  });
  return new Set([...best.values()].map(([i]) => i));
}
// The selected statistic of the good run, at its look at or before that step.
function goodAt(slot, look) {
  const { good } = facts, row = good.slots[slot];
  let found = -1;
  for (let i = 0; i < good.firsts.length; i++) if (stepIn(good, row, i) >= 0 && stepIn(good, row, i) <= looks[look][1]) found = i;
  return found < 0 ? NaN : read(good, metrics[state.metric].name, row, found);
}
const picturedAt = (slot, look) => $("run").value === "good" ? goodAt(slot, look) : valueAt(state.metric, slot, look);
function drawHeat() {
  const metric = metrics[state.metric], host = $("heat"), focused = host.contains(document.activeElement), casts = castsShown();
  const shown = groups.map((group) => ({ ...group, members: group.members.filter(([i]) => casts.has(i)) })).filter((group) => group.members.length);
  const labels = shown.flatMap((group) => group.members.map(([, label]) => label));
  const { left, right } = MARGIN, letters = Math.floor((left - 12) / 6.6);
  const high = clamp(560 / labels.length, 4, 22), bottom = shown.length * 20 + labels.length * high;
  const { svg, width } = canvas(host, bottom + 22, `Heat map of ${metric.name}: layers down, steps across. Arrow keys move, Enter goes to the tensor.`);
  const [x0, x1] = view, X = (x) => clamp(x1 > x0 ? left + (x - x0) / (x1 - x0) * (width - left - right) : left, left, width - right);
  const places = looks.map((_, look) => {
    const [a, b] = x1 > x0 ? edges(look).map(X) : [left, width - right];
    return { a, b, wide: b > a ? Math.max(1.5, b - a - (b - a > 6)) : 0 };
  });
  const tall = Math.max(3, high - 1);
  for (const [key, value] of [["tabindex", 0], ["role", "application"], ["aria-describedby", "cell"]]) svg.setAttribute(key, value);
  const paths = {};  // one path for each colour
  let y = 0;
  heatRows = [];
  for (const group of shown) {
    put(svg, "text", { class: "group", x: 0, y: y + 15 }, `${group.kind}  ${elide(group.title, Math.floor(width / 9))}`.trim());
    y += 20;
    let free = 0;
    for (const [slot, label] of group.members) {
      if (y >= free) {
        put(svg, "text", { x: left - 8, y: y + high / 2 + 4, "text-anchor": "end" }, elide(label, letters));
        free = y + 12;
      }
      put(svg, "rect", { class: "empty", x: left, y, width: width - left - right, height: tall });
      for (let look = 0; look < looks.length; look++) {
        const share = level(state.metric, slot, picturedAt(slot, look)), { a, wide } = places[look];
        if (share === null || !wide) continue;
        const css = (metric.warns ? "h" : "n") + shade(share);
        paths[css] = (paths[css] ?? "") + `M${a.toFixed(1)} ${y.toFixed(1)}h${wide.toFixed(1)}v${tall.toFixed(1)}h-${wide.toFixed(1)}z`;
      }
      heatRows.push({ slot, y });
      y += high;
    }
  }
  for (const [css, d] of Object.entries(paths)) put(svg, "path", { class: css, d });
  for (const x of x1 > x0 ? wholeTicks(x0, x1, Math.max(3, width / 110)) : [x0]) {
    put(svg, "text", { x: X(x), y: bottom + 16, "text-anchor": "middle" }, plain(x));
  }
  put(svg, "text", { x: left - 8, y: bottom + 16, "text-anchor": "end" }, "step");
  const row = heatRows.find((r) => r.slot === state.slot), here = places[state.look], box = { width: Math.max(4, here.wide + 2), height: tall + 2 };
  if (here.wide) for (const css of ["selected halo", "selected"]) put(svg, "rect", { class: css, ...box, x: here.a - 1, y: row.y - 1 });
  const at = ({ x, y }) => {
    const found = heatRows.find((r) => y >= r.y && y < r.y + high), look = places.findIndex(({ a, b, wide }) => wide && x >= a && x <= b);
    return found && look >= 0 ? { slot: found.slot, look } : null;
  };
  crossed(svg, "step", { left, right: width - right, top: 20, bottom, low: x0, high: x1 });
  hover(svg, (x, y) => {
    const found = at({ x, y });
    pointAt("step", found && looks[found.look][0]);
    return found && cellText(found).split("; ");
  });
  svg.addEventListener("click", (event) => { const found = at(pointIn(svg, event)); if (found) select(found); });
  svg.addEventListener("keydown", heatKey);
  if (focused) svg.focus({ preventScroll: true });
  drawLegend(metric);
}
function heatKey(event) {
  const row = heatRows.findIndex((r) => r.slot === state.slot), last = looks.length - 1, all = heatRows.length;
  const moves = {
    ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    PageUp: [-all, 0], PageDown: [all, 0], Home: [0, -last], End: [0, last],
  };
  const move = moves[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey || !(move || event.key === "Enter")) return;
  event.preventDefault();
  if (move) select({ slot: heatRows[clamp(row + move[0], 0, all - 1)].slot, look: clamp(state.look + move[1], 0, last) });
  else $("tensor-title").focus();
}
function cellText({ slot, look }) {
  const step = stepAt(slot, look), { name, unit } = metrics[state.metric];
  if (step < 0) return `${nameOf(slot)}; no look around step ${plain(looks[look][0])}`;
  const value = `${nameOf(slot)}; step ${plain(step)}; ${name} ${human(valueAt(state.metric, slot, look), unit)}`;
  return facts.good ? `${value}; the good run: ${human(goodAt(slot, look), unit)}` : value;
}
function drawLegend({ warns, below, calm, alarm, unit, log, meaning }) {
  const host = $("legend"), [low, high] = below ? ["as good as the format", `${alarm} dB below that`] : [human(calm, unit), human(alarm, unit)];
  host.replaceChildren();
  put(host, "span", {}, warns ? `calm: ${low}` : low);
  for (let i = 0; i < 9; i++) put(host, "i", { class: (warns ? "h" : "n") + i });
  put(host, "span", {}, warns ? `alarming: ${high}` : high);
  put(host, "span", { class: "muted" }, (log ? "logarithmic; " : "") + meaning);
}
function fillHeatTable() {
  const { unit } = metrics[state.metric], when = ([first, last]) => first === last ? `${first}` : `${first} to ${last}`;
  const row = ({ slot }) => [slots[slot].layer, ...looks.map((_, look) => human(valueAt(state.metric, slot, look), unit))];
  fill($("heat-table"), ["layer", ...looks.map(when)], heatRows.map(row));
}

// ---- the tensor of the selected cell ------------------------------------------------------------------------------

function drawTensor() {
  const slot = slots[state.slot], step = stepAt(state.slot, state.look), when = step < 0 ? "It had no look here." : `Step ${plain(step)}.`;
  $("tensor-title").textContent = said(nameOf(state.slot));
  $("tensor-cast").textContent = `${said(`${castOf(slot)}${slot.scaling ? `, ${slot.scaling} scaling` : ""}`)}. ${said(when)}`;
  $("cell").textContent = said(cellText(state));
  Object.assign($("look"), { max: looks.length - 1, value: state.look });
  $("look-text").textContent = said(step < 0 ? "–" : `step ${plain(step)}`);
  fill($("numbers-table"), ["statistic", "value", "meaning"], metrics.map(({ name, unit, meaning }, i) => [
    name, human(valueAt(i, state.slot, state.look), unit), unit.startsWith("of x") ? `${meaning}; unit ${unit}` : meaning,
  ]));
  const distance = (h) => Math.abs(h.look - state.look), mine = histograms.filter((h) => h.slot === state.slot);
  const nearest = mine.length ? mine.reduce((best, h) => distance(h) < distance(best) ? h : best) : null;
  $("histograms").hidden = !nearest;
  $("no-histograms").hidden = Boolean(nearest);
  drawCurve();
  drawScales();
  if (!nearest) return;
  const beside = goodFor(nearest);
  $("histogram-step").textContent = said(`${nearest.look === state.look ? "This is step" : "The nearest histogram on this page is of step"} ${plain(stepAt(nearest.slot, nearest.look))}.`);
  const counted = nearest.exponents.counts.length > 0;  // a run that was watched with detail="numbers" has none
  $("magnitudes").hidden = !counted;
  $("no-magnitudes").hidden = counted;
  if (counted) {
    seen = { ...histogramOf(nearest), beside: beside?.exponents.counts.length ? octavesOf(histogramOf({ ...beside, slot: nearest.slot, look: nearest.look })) : null };
    $("format").value = formats[slot.format] ? slot.format : "E4M3";
    $("shift").value = 0;
    drawWindow();
  }
  const floor = facts.floor[state.slot], mark = floor === null ? null : { at: floor, text: `bell-shaped, in ${slot.format}` };
  const rows = bars($("row-sqnr"), { ...nearest.rows, beside: beside?.rows, wide: 0.5, title: "Rows by SQNR of the row", unit: "dB", mark });
  const more = beside ? ["the good run"] : [];
  fill($("row-sqnr-table"), ["SQNR, dB", "share of rows", ...more], rows);
  const spread = bars($("spread"), { ...nearest.spread, beside: beside?.spread, wide: 1, title: "1x128 blocks by their amax", unit: "octaves below", mark: null });
  fill($("spread-table"), ["octaves below", "share of blocks", ...more], spread);
}
let seen = null;
// Bins of a quarter octave with edges in |x| and counts, and the scale of the cast, or that of current scaling.
function histogramOf({ look, slot, exponents }) {
  const edge = (bin) => 2 ** (Math.floor(bin / 4) - 127) * (1 + (bin % 4) / 4);
  const bins = [...exponents.counts].map((count, i) => ({ low: edge(exponents.first + i), high: edge(exponents.first + i + 1), count }));
  bins.at(-1).high = Math.min(bins.at(-1).high, Math.max(named("amax", slot, look) || Infinity, bins.at(-1).low * 1.0001));
  const used = named("scale_min", slot, look), several = named("scale_max", slot, look) > used * 1.001;
  const current = (formats[slots[slot].format] ?? formats.E4M3).max / (named("amax", slot, look) || bins.at(-1).high);
  return { bins, slot, look, several, known: used > 0, scale: used > 0 ? used : current, total: bins.reduce((sum, bin) => sum + bin.count, 0) };
}
// Predicts a cast by one scale and format from the bins: elements are even within a bin, errors within a step.
function predict({ bins, total }, format, scale) {
  const gone = format.subnormal / 2;
  const part = ({ low, high, count }, from, to) => count * clamp((Math.min(to, high * scale) - Math.max(from, low * scale)) / ((high - low) * scale), 0, 1);
  const share = (from, to) => 100 * bins.reduce((sum, bin) => sum + part(bin, from, to), 0) / total;
  let signal = 0, noise = 0;
  for (const { low, high, count } of bins) {
    const y = (low + high) / 2 * scale, step = Math.max(format.subnormal, format.eps * 2 ** Math.floor(Math.log2(y)));
    signal += count * y * y;
    noise += count * (y < gone ? y * y : y > format.clip ? (y - format.max) ** 2 : step * step / 12);
  }
  return { underflow: share(0, gone), subnormal: share(gone, format.normal), clipped: share(format.clip, Infinity), sqnr: 10 * Math.log10(signal / noise) };
}
function octavesOf({ bins, total }) {
  const octaves = new Map();
  for (const { low, count } of bins) {
    const e = Math.floor(Math.log2(low) + 1e-9);
    octaves.set(e, (octaves.get(e) ?? 0) + count / total);
  }
  return octaves;
}
function drawWindow() {
  const format = formats[$("format").value], shift = Number($("shift").value), scale = seen.scale * 2 ** shift;
  const octaves = octavesOf(seen), { beside } = seen;
  drawOctaves(octaves, [format.subnormal / 2, format.normal, format.clip].map((y) => Math.log2(y / scale)));
  const whose = seen.known ? (seen.several ? "the smallest scale used" : "the scale used") : "the scale of current scaling";
  $("shift-text").textContent = said(`${human(scale)}: ${shift ? `2^${String(shift).replace("-", "−")} times ` : ""}${whose}`);
  const told = predict(seen, format, scale), measured = (name) => named(name, seen.slot, seen.look);
  fill($("predicted"), ["at this scale and format", "predicted", "measured in the run"], [
    ["cast to 0", human(told.underflow, "%"), human(measured("underflow_pct"), "%")],
    ["subnormal", human(told.subnormal, "%"), human(measured("subnormal_pct"), "%")],
    ["clipped", human(told.clipped, "%"), human(measured("overflow_pct"), "%")],
    ["SQNR", human(told.sqnr, "dB"), human(measured("sqnr_db"), "dB")],
  ]);
  const magnitudes = [...new Set([...octaves.keys(), ...beside?.keys() ?? []])].sort((a, b) => a - b);
  const shares = (e) => [octaves, ...(beside ? [beside] : [])].map((one) => human(100 * (one.get(e) ?? 0), "%"));
  fill($("window-table"), ["magnitude", "share of elements", ...(beside ? ["the good run"] : [])], magnitudes.map((e) => [`2^${e} to 2^${e + 1}`, ...shares(e)]));
}
function drawOctaves(octaves, [gone, normal, clip]) {
  const { svg, width } = canvas($("window"), 250, "Elements by magnitude, and the range of the format at this scale");
  const left = 52, right = 16, top = 38, base = 214, least = Math.min(-4, Math.floor(Math.log10(1 / seen.total)));
  const { beside } = seen, all = [...octaves.keys(), ...beside?.keys() ?? []];
  const x0 = Math.min(...all, Math.floor(gone) - 2), x1 = Math.max(...all, Math.ceil(clip)) + 2;
  const X = (x) => left + (clamp(x, x0, x1) - x0) / (x1 - x0) * (width - left - right);
  const Y = (share) => base - clamp(1 - Math.log10(share) / least, 0, 1) * (base - top);
  const zones = [["cast to 0", "gone", x0, gone], ["subnormal", "small", gone, normal], ["normal", "normal", normal, clip], ["clipped", "clip", clip, x1]];
  for (const [text, css, a, b] of zones) {
    put(svg, "rect", { class: `zone ${css}`, x: X(a), y: top - 20, width: Math.max(0, X(b) - X(a)), height: base - top + 20 });
    if (X(b) - X(a) > text.length * 6) put(svg, "text", { class: "name", x: (X(a) + X(b)) / 2, y: top - 6, "text-anchor": "middle" }, text);
  }
  for (let power = 0; power >= least; power -= 2) {
    put(svg, "line", { class: "grid", x1: left, x2: width - right, y1: Y(10 ** power), y2: Y(10 ** power) });
    put(svg, "text", { x: left - 6, y: Y(10 ** power) + 4, "text-anchor": "end" }, power > -5 ? `${100 * 10 ** power} %` : `1e−${-power - 2} %`);
  }
  for (const [e, share] of octaves) {
    const [, css] = zones.find(([, , a, b]) => e + 0.5 >= a && e + 0.5 < b) ?? zones[e < gone ? 0 : 3];
    const bar = { x: X(e) + 0.5, width: Math.max(1, X(e + 1) - X(e) - 1), y: Y(share), height: base - Y(share) };
    put(put(svg, "rect", { class: `bar ${css}`, ...bar }), "title", {}, `2^${e} to 2^${e + 1}: ${human(100 * share, "%")}`);
  }
  if (beside) outline(svg, [...beside].sort(([a], [b]) => a - b).map(([e, share]) => [X(e), X(e + 1), Y(share)]), { base, x: width - right - 110, y: 10 });
  for (const x of wholeTicks(x0, x1, Math.max(3, width / 90))) {
    put(svg, "text", { x: X(x), y: base + 16, "text-anchor": "middle" }, `2${String(x).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻")}`);
  }
  put(svg, "text", { x: width - right, y: base + 32, "text-anchor": "end" }, "magnitude of non-zero elements");
  put(svg, "text", { x: 0, y: 10 }, "share of elements, logarithmic");
}
// [step, ...statistics] of each look of the selected cast: of this run, or in another grid of the page (light rows, the
// good run). No rows if that grid has no such cast.
function rowsOf(other, names) {
  const grid = other ?? facts.own, row = other ? other.slots[state.slot] : state.slot;
  const rows = grid.firsts.map((_, i) => [stepIn(grid, row, i), ...names.map((name) => read(grid, name, row, i))]);
  return rows.filter(([step]) => step >= 0);
}
// The selected statistic by step, and that of the good run.
function drawCurve() {
  const { name, unit } = metrics[state.metric], now = stepAt(state.slot, state.look);
  const [rows, good] = [rowsOf(null, [name]), facts.good ? rowsOf(facts.good, [name]) : []];
  const curve = (rows, name, css) => ({ name, xs: rows.map(([step]) => step), ys: rows.map((row) => row[1]), css });
  const series = [curve(rows, "this run", "s1")];
  if (good.length) series.unshift(curve(good, "the good run", "faint"));
  const ys = series.flatMap((s) => s.ys).filter(Number.isFinite), positive = ys.filter((y) => y > 0);
  $("curve-of-statistic").hidden = !ys.length;
  if (!ys.length) return;
  $("curve-title").textContent = said(`${name}${unit ? ` (${unit})` : ""}, by step`);
  const log = unit !== "%" && positive.length === ys.length && Math.max(...ys) > 30 * Math.min(...ys);
  const xs = series.flatMap((s) => s.xs), x = [Math.min(...xs), Math.max(...xs)];
  const frame = lines($("curve"), { height: 200, label: `${name} of ${nameOf(state.slot)} by step`, series, x, log, top: 36 });
  if (now >= 0) put(frame.svg, "line", { class: "now", x1: frame.X(now), x2: frame.X(now), y1: frame.top, y2: frame.base });
  const of = Object.fromEntries(good);
  const cells = rows.map(([step, value]) => [plain(step), human(value, unit), ...(good.length ? [human(of[step], unit)] : [])]);
  fill($("curve-table"), ["step", "this run", ...(good.length ? ["the good run"] : [])], cells);
}
function drawScales() {
  const scales = ["amax", "scale_min", "scale_max"], fine = facts.series?.slots[state.slot] >= 0 ? facts.series : null;
  const rows = rowsOf(fine, scales), top = formats[slots[state.slot].format]?.max ?? NaN;
  const xs = rows.map(([step]) => step), amax = rows.map((row) => row[1]), fits = rows.map((row) => top / row[2]), least = rows.map((row) => top / row[3]);
  const series = [{ name: "largest number that fits, at the scale used", xs, ys: fits, css: "s2" }, { name: "amax", xs, ys: amax, css: "s1" }];
  if (least.some((v, i) => v < fits[i] * 0.999)) series.unshift({ name: "at the block with the largest scale", xs, ys: least, css: "faint" });
  const good = facts.good ? rowsOf(facts.good, ["amax"]) : [];
  if (good.length) series.unshift({ name: "amax of the good run", xs: good.map(([step]) => step), ys: good.map((row) => row[1]), css: "faint" });
  const known = series.filter((s) => s.ys.some((y) => Number.isFinite(y) && y > 0));
  $("amax-and-scale").hidden = !known.length;
  if (!known.length) return;
  const label = "amax and the largest number that fits, by step", now = stepAt(state.slot, state.look);
  const frame = lines($("scales"), { height: 220, label, series: known, x: [Math.min(...xs), Math.max(...xs)], log: true, top: 36 });
  if (now >= 0) put(frame.svg, "line", { class: "now", x1: frame.X(now), x2: frame.X(now), y1: frame.top, y2: frame.base });
  fill($("scales-table"), ["step", "amax", "largest number that fits"], xs.map((x, i) => [plain(x), human(amax[i]), human(fits[i])]));
}

// ---- what is selected ---------------------------------------------------------------------------------------------

function options(host, entries, chosen) {
  host.replaceChildren();
  for (const [value, text] of entries) put(host, "option", value === chosen ? { value, selected: "" } : { value }, text);
  host.closest("label").hidden = entries.length < 2;
}
function select(changes, remember = true) {
  state = { ...state, ...changes };
  const chosen = slots[state.slot], alike = slots.filter((slot) => slot.tensor === chosen.tensor), { name } = metrics[state.metric];
  options($("metric"), metrics.map((metric) => [metric.name, metric.name]), name);
  options($("tensor"), [...new Map(slots.map((slot) => [slot.tensor, slot.symbol]))], chosen.tensor);
  options($("cast"), [...new Map(alike.map((slot) => [castKey(slot), castOf(slot)]))], castKey(chosen));
  drawHeat();
  drawTensor();
  if ($("heat-details").open) fillHeatTable();
  const step = Math.max(stepAt(state.slot, state.look), looks[state.look][0]);
  if (remember) history.replaceState(null, "", `#${root}slot=${state.slot}&metric=${name}&step=${step}`);
}
// The slot most like the selected one among those that `wanted` accepts.
function similar(wanted) {
  const here = slots[state.slot];
  const alike = (slot) => wanted(slot) ? (slot.layer === here.layer) + (castKey(slot) === castKey(here)) / 2 + (slot.direction === here.direction) / 4 : -1;
  return slots.reduce((best, slot, i) => alike(slot) > alike(slots[best]) ? i : best, 0);
}
const addressed = () => location.hash.startsWith(`#${root}`) && location.hash.includes("=");
function fromAddress() {
  const asked = new URLSearchParams(addressed() ? location.hash.slice(1 + root.length) : ""), changes = {}, metric = metricAt[asked.get("metric")];
  const [slot, look, step] = ["slot", "look", "step"].map((key) => asked.has(key) ? Number(asked.get(key)) : NaN);
  if (slots[slot]) changes.slot = slot;
  if (looks[look]) changes.look = look;
  if (metric !== undefined) changes.metric = metric;
  if (!Number.isNaN(step)) changes.look = looks.reduce((best, [first], i) => first <= step ? i : best, 0);
  return changes;
}

// ---- patches ------------------------------------------------------------------------------------------------------

for (const box of page.querySelectorAll(".patches")) {
  const tabs = [...box.querySelectorAll("[role=tab]")], panels = [...box.querySelectorAll("[role=tabpanel]")];
  const show = (wanted) => tabs.forEach((tab, i) => {
    tab.setAttribute("aria-selected", i === wanted);
    tab.tabIndex = i === wanted ? 0 : -1;
    panels[i].hidden = i !== wanted;
  });
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => show(i));
    tab.addEventListener("keydown", (event) => {
      const to = i + { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (tabs[to]) { show(to); tabs[to].focus(); }
    });
  });
  box.classList.add("tabbed");
  show(0);
}
for (const button of page.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  const value = button.parentElement.querySelector("pre").textContent;
  try {
    await navigator.clipboard.writeText(value);
  } catch {  // a page from file:// may not have permission
    const area = Object.assign(document.createElement("textarea"), { value });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = said("copied");
  setTimeout(() => { button.textContent = said("copy"); }, 1500);
});

// The left margin of the time axis holds the labels of the heat map.
function setMargin() {
  const longest = Math.max(3, ...groups.flatMap((group) => group.members.map(([, label]) => label.length)));
  MARGIN.left = Math.max(56, clamp(longest, 3, innerWidth < 700 ? 9 : 20) * 6.6 + 12);
}

// ---- start --------------------------------------------------------------------------------------------------------

setMargin();
$("log").closest(".controls").hidden = !steps.length;
$("log").checked = spread([...facts.loss.loss[1], ...(facts.baseline?.loss[1] ?? [])], 3);
$("log").addEventListener("change", drawTime);
for (const id of steps.length ? ["from", "to"] : []) {
  Object.assign($(id), { min: whole[0], max: whole[1], value: view[id === "from" ? 0 : 1] });
  $(id).addEventListener("change", () => zoom([Number($("from").value), Number($("to").value)]));
}
$("all-steps").addEventListener("click", () => zoom(whole));
$("all-steps").hidden = !kept.view;
drawTime();
if (slots.length && metrics.length) {
  options($("format"), Object.keys(formats).map((name) => [name, name]), "E4M3");
  state = { slot: facts.start.slot, look: facts.start.look, metric: metricAt[facts.start.metric] ?? 0 };
  select(fromAddress(), false);
  const castIs = (key) => (slot) => slot.tensor === slots[state.slot].tensor && castKey(slot) === key;
  $("metric").addEventListener("change", ({ target }) => select({ metric: metricAt[target.value] }));
  $("tensor").addEventListener("change", ({ target }) => select({ slot: similar((slot) => slot.tensor === target.value) }));
  $("cast").addEventListener("change", ({ target }) => select({ slot: similar(castIs(target.value)) }));
  $("run").closest("label").hidden = !facts.good;
  $("run").addEventListener("change", drawHeat);
  $("look").addEventListener("input", ({ target }) => select({ look: Number(target.value) }));
  for (const id of ["format", "shift"]) $(id).addEventListener("input", drawWindow);
  $("reset").addEventListener("click", () => { $("shift").value = 0; drawWindow(); });
  $("heat-details").addEventListener("toggle", fillHeatTable);
  addEventListener("hashchange", () => {
    if (!addressed()) return;
    select(fromAddress(), false);
    $("heat-map").scrollIntoView();
  }, until);
}
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  setMargin();
  drawTime();
  if (state) select({}, false);
}, until);
document.documentElement.dataset.drawn = "yes";
// Adds steps of a run that goes on. A zoomed picture stays.
function append(points) {
  const last = Math.max(facts.loss.loss[0].at(-1) ?? -1, facts.loss.grad_norm[0].at(-1) ?? -1);
  for (const [step, ...values] of points.filter(([step]) => step > last)) {
    values.forEach((value, i) => {
      const [xs, ys] = curves[i][0];
      if (value === null && !xs.length) return;
      xs.push(step);
      ys.push(value);
    });
    steps.push(step);
  }
  for (const [curve] of curves) thinOut(curve, 1600);
  steps.splice(0, steps.length, ...curves.flatMap(([[xs]]) => xs), ...experiment.steps, ...looks.flat());
  const zoomed = view[0] > whole[0] || view[1] < whole[1];
  whole = [Math.min(...steps), Math.max(...steps)];
  if (zoomed) drawTime(); else zoom(whole);
}
const identity = (slot) => [slot.layer, slot.tensor, castKey(slot)].join("|");
return {
  append,
  leave() {
    leaving.abort();
    const zoomed = view[0] > whole[0] || view[1] < whole[1], chosen = location.hash.includes("=") && state;
    return { view: zoomed ? view : undefined, cast: chosen ? identity(slots[state.slot]) : undefined };
  },
  find: (cast) => slots.findIndex((slot) => identity(slot) === cast),
};
}
// Halves the points of a curve; of each four neighbours the lowest and the highest stay.
function thinOut([xs, ys], most) {
  if (xs.length <= most) return;
  const keep = new Set([0, xs.length - 1]);
  for (let i = 0; i < xs.length; i += 4) {
    const four = [i, i + 1, i + 2, i + 3].filter((j) => Number.isFinite(ys[j]));
    for (const sign of [1, -1]) if (four.length) keep.add(four.reduce((a, b) => sign * ys[b] > sign * ys[a] ? b : a));
  }
  for (const values of [xs, ys]) values.splice(0, values.length, ...values.filter((_, i) => keep.has(i)));
}
