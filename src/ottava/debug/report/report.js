"use strict";
// Draws the pictures of the report and answers pointer and keys. One state (slot, look, metric), kept in the address,
// so that a link can point at a cell: report.html#slot=3&metric=underflow_pct&step=40. What each number means is said by
// the JSON in #facts; the numbers are in #numbers, see payload.py.
(async () => {
const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);
const { slots, groups, looks, metrics, formats, events } = facts;
const metricAt = Object.fromEntries(metrics.map((metric, i) => [metric.name, i]));
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// ---- numbers ------------------------------------------------------------------------------------------------------

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 4, mixed = new DataView(new ArrayBuffer(planes.length));
  for (let i = 0; i < count; i++) for (let p = 0; p < 4; p++) mixed.setUint8(4 * i + p, planes[p * count + i]);
  return Float32Array.from({ length: count }, (_, i) => mixed.getFloat32(4 * i));
}
const numbers = await unpack($("numbers").textContent);
const size = slots.length * looks.length;
const valueAt = (metric, slot, look) => metric < 0 ? NaN : numbers[metric * size + slot * looks.length + look];
const stepAt = (slot, look) => valueAt(metrics.length, slot, look);
const named = (name, slot, look) => valueAt(metricAt[name] ?? -1, slot, look);
const countsFrom = numbers.length - facts.counts;
let offset = countsFrom;
const histograms = facts.histograms.map(([slot, look, ...bins]) => {
  const parts = [0, 1, 2].map((i) => {
    const [first, length] = bins.slice(2 * i, 2 * i + 2);
    return { first, counts: numbers.subarray(offset, offset += length) };
  });
  return { slot, look, exponents: parts[0], rows: parts[1], spread: parts[2] };
});

function human(x, unit = "") {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const tail = ["", "of x", "of x squared", "elements"].includes(unit) ? "" : ` ${unit}`;
  const sign = x < 0 ? "−" : "", a = Math.abs(x);
  if (a === Infinity) return sign + "∞" + tail;
  if (unit === "elements") return sign + Math.round(a).toLocaleString("en");
  const r = Number(a.toPrecision(3));
  if (r === 0) return sign + "0" + tail;
  if (r < 1e-3 || r >= 1e6) return sign + r.toExponential(2).replace("+", "").replace("e-", "e−") + tail;
  const places = Math.max(0, 2 - Math.floor(Math.log10(r)));
  return sign + r.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places }) + tail;
}
const elide = (name, width) =>
  name.length <= width ? name : name.slice(0, width - 1 - (width >> 1)) + "…" + name.slice(-(width >> 1));
const castOf = (s) => `${s.recipe} ${s.format}${s.granularity ? `[${s.granularity}]` : ""}${s.direction === "col" ? " of the transpose" : ""}`
  + (s.source === "hook" ? ", simulated" : "");
const castKey = (s) => [s.recipe, s.direction, s.source].join("|");

// Where a value lies between calm (0) and alarming (1); null where it is not known.
function level(metric, slot, value) {
  const { calm, alarm, log, below } = metrics[metric];
  if (Number.isNaN(value) || (below && facts.floor[slot] === null)) return null;
  const f = log ? (x) => Math.log10(Math.max(x, 1e-300)) : (x) => x;
  return clamp((f(below ? facts.floor[slot] - value : value) - f(calm)) / (f(alarm) - f(calm) || 1), 0, 1);
}
const shade = (share) => Math.min(8, Math.floor(share * 9));

// ---- drawing ------------------------------------------------------------------------------------------------------

function put(parent, tag, attributes = {}, text = null) {
  const svg = tag === "svg" || parent.namespaceURI.endsWith("svg");
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}
function canvas(host, height, label) {
  const width = Math.max(280, host.clientWidth || 1000);
  host.replaceChildren();
  const svg = put(host, "svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  return { svg, width, height };
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const first = Math.ceil(low / step - 1e-9), found = [];
  for (let i = first; i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}
// Ticks on a logarithmic axis from 2**low to 2**high: powers of 10, or of 2, or plain numbers where it is short.
function powers(low, high) {
  const base = high - low > 13 ? 10 : 2, unit = Math.log2(base), found = [];
  const step = Math.max(1, Math.ceil((high - low) / unit / 6));
  for (let e = Math.ceil(low / unit / step) * step; e * unit <= high; e += step) found.push(base ** e);
  return found.length > 1 ? found : ticks(2 ** low, 2 ** high, 4);
}
const tip = $("tip");
function hover(svg, answer) {
  svg.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const lines = answer(point.x, point.y);
    tip.style.display = lines ? "block" : "none";
    if (!lines) return;
    tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    tip.style.left = clamp(event.clientX + 16, 8, Math.max(8, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
// Lines over steps. series: {name, xs, ys, css}. Returns the mapping, for what is drawn on top.
function lines(host, { height, label, unit, series, x: [x0, x1], log, bottom = 24, top = 22, left = 56, right = 14 }) {
  const { svg, width } = canvas(host, height, label);
  const ys = series.flatMap((s) => s.ys).filter((y) => y !== null && Number.isFinite(y) && (!log || y > 0));
  const f = log ? Math.log2 : (y) => y;
  let y0 = Math.min(...ys.map(f)), y1 = Math.max(...ys.map(f));
  if (!ys.length) [y0, y1] = [0, 1];
  const pad = 0.06 * (y1 - y0) || 0.5;
  [y0, y1] = [y0 - pad, y1 + pad];
  const X = (x) => left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (width - left - right);
  const Y = (y) => height - bottom - (f(y) - y0) / (y1 - y0) * (height - top - bottom);
  const marks = log ? powers(y0, y1) : ticks(y0, y1, 5);
  for (const y of marks) {
    put(svg, "line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) });
    put(svg, "text", { x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, human(y));
  }
  if (bottom > 10) for (const x of ticks(x0, x1, Math.max(2, width / 130)).filter(Number.isInteger)) {
    put(svg, "text", { x: X(x), y: height - 6, "text-anchor": "middle" }, x.toLocaleString("en"));
  }
  let at = left;
  for (const s of series) {
    let path = "", down = false;
    s.xs.forEach((x, i) => {
      const fine = s.ys[i] !== null && Number.isFinite(s.ys[i]) && (!log || s.ys[i] > 0);
      if (fine) path += `${down ? "L" : "M"}${X(x).toFixed(1)} ${Y(s.ys[i]).toFixed(1)}`;
      down = fine;
    });
    put(svg, "path", { class: `curve ${s.css}`, d: path || "M0 0" });
    if (s.xs.length < 2 && path) put(svg, "circle", { class: `dot ${s.css}`, cx: X(s.xs[0]), cy: Y(s.ys[0]), r: 3.5 });
    put(svg, "path", { class: `curve ${s.css}`, d: `M${at} 9h20` });
    at += 60 + put(svg, "text", { class: "name", x: at + 26, y: 13 }, s.name).getComputedTextLength();
  }
  if (unit) put(svg, "text", { x: width - right, y: 13, "text-anchor": "end" }, unit);
  const cross = put(svg, "line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  hover(svg, (px) => {
    const x = x0 + (px - left) / (width - left - right) * (x1 - x0), xs = series.flatMap((s) => s.xs);
    if (!xs.length) return null;
    const near = xs.reduce((best, v) => Math.abs(v - x) < Math.abs(best - x) ? v : best);
    cross.setAttribute("x1", X(near)); cross.setAttribute("x2", X(near)); cross.setAttribute("visibility", "visible");
    const found = series.map((s) => [s.name, s.ys[s.xs.indexOf(near)]]).filter(([, y]) => y !== undefined);
    return [`step ${near.toLocaleString("en")}`, ...found.map(([name, y]) => `${name} ${human(y)}`)];
  });
  svg.addEventListener("pointerleave", () => cross.setAttribute("visibility", "hidden"));
  return { svg, X, Y, width, left, right, y0, y1 };
}

// ---- loss, gradient norm, events, worst tensor of each look -----------------------------------------------------------

function drawTime() {
  const { loss, grad_norm: norm } = facts.loss;
  const shown = events.filter((event) => !event.quiet);
  const steps = [...loss[0], ...norm[0], ...looks.flat(), ...shown.map((event) => event.step)];
  if (!steps.length) return;
  const x = [Math.min(...steps), Math.max(...steps)];
  const log = (ys) => { const v = ys.filter((y) => y > 0); return v.length && Math.max(...v) > 30 * Math.min(...v); };
  if (loss[0].length) {
    const series = [{ name: "loss", xs: loss[0], ys: loss[1], css: "s1" }];
    if (facts.baseline?.loss[0].length) {
      const within = facts.baseline.loss[0].map((step) => step >= x[0] && step <= x[1]);
      const pick = (values) => values.filter((_, i) => within[i]);
      series.unshift({ name: "loss of the baseline", xs: pick(facts.baseline.loss[0]), ys: pick(facts.baseline.loss[1]), css: "faint" });
    }
    const ys = series.flatMap((s) => s.ys);
    const frame = lines($("loss"), { height: 250, label: "Loss by step; the table below has the numbers", series, x, log: log(ys), top: 46, bottom: 8 });
    drawEvents(frame, shown);
    const lost = facts.loss.not_finite_from;
    if (lost !== null) put(frame.svg, "text", { class: "alert", x: Math.min(frame.X(lost), frame.width - 150), y: 242 }, "✕ no finite loss from here");
  }
  if (norm[0].length) lines($("norm"), { height: 110, label: "Gradient norm by step", series: [{ name: "gradient norm", xs: norm[0], ys: norm[1], css: "s2" }], x, log: log(norm[1]), bottom: 8 });
  drawStrip(x);
}
function drawEvents({ svg, X, width, right }, shown) {
  const places = new Map();
  for (const event of shown) {
    const at = Math.round(X(event.step) / 20);
    places.set(at, [...(places.get(at) ?? []), event]);
  }
  for (const here of places.values()) {
    const px = clamp(X(here[0].step), 0, width - right), mark = put(svg, "g", { class: "event" });
    put(mark, "line", { x1: px, x2: px, y1: 42, y2: 242 });
    put(mark, "circle", { cx: px, cy: 33, r: 9 });
    put(mark, "text", { x: px, y: 37, "text-anchor": "middle" }, here.length > 1 ? here.length : here[0].letter);
    put(mark, "title", {}, here.map((event) => `step ${event.step}: ${event.kind}, ${event.text}`).join("\n"));
  }
}
// Left and right edge of each look on an axis of steps: half-way to its neighbours.
function edges(look) {
  const middle = ([first, last]) => (first + last) / 2, here = middle(looks[look]);
  const gap = looks.length > 1 ? (middle(looks.at(-1)) - middle(looks[0])) / (looks.length - 1) : 1;
  const before = look ? here - middle(looks[look - 1]) : gap, after = look < looks.length - 1 ? middle(looks[look + 1]) - here : gap;
  return [here - Math.min(before, 2 * gap) / 2, here + Math.min(after, 2 * gap) / 2];
}
function drawStrip([x0, x1]) {
  const { svg, width } = canvas($("strip"), 56, "The worst tensor of each look, coloured by how alarming it is");
  const left = 56, right = 14, X = (x) => clamp(left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (width - left - right), left, width - right);
  put(svg, "text", { x: left, y: 12, class: "name" }, "worst tensor of each look");
  const cells = facts.worst.map((worst, look) => {
    let [a, b] = edges(look).map(X);
    if (x1 === x0) [a, b] = [left, width - right];
    if (worst) put(svg, "rect", { class: `h${shade(clamp(worst[3], 0, 1))}`, x: a, width: Math.max(1.5, b - a), y: 18, height: 18 });
    return [a, b];
  });
  for (const x of ticks(x0, x1, Math.max(2, width / 130)).filter(Number.isInteger)) put(svg, "text", { x: X(x), y: 52, "text-anchor": "middle" }, x.toLocaleString("en"));
  put(svg, "text", { x: left - 8, y: 52, "text-anchor": "end" }, "step");
  const lookAt = (px) => cells.findIndex(([a, b]) => px >= a && px <= b);
  hover(svg, (px) => {
    const look = lookAt(px), worst = facts.worst[look];
    if (!worst) return null;
    const [slot, name, value] = worst;
    return [`step ${stepAt(slot, look).toLocaleString("en")}`, `${slots[slot].symbol} of ${slots[slot].layer}`, `${name} ${human(value, metrics[metricAt[name]].unit)}`];
  });
  svg.addEventListener("click", (event) => {
    const look = lookAt(new DOMPoint(event.clientX, 0).matrixTransform(svg.getScreenCTM().inverse()).x);
    if (facts.worst[look]) select({ slot: facts.worst[look][0], look, metric: metricAt[facts.worst[look][1]] });
  });
}

// ---- heat map -----------------------------------------------------------------------------------------------------

let state, heatRows = [];
function drawHeat() {
  const chosen = slots[state.slot], metric = metrics[state.metric], scroll = $("heat");
  const same = (i) => slots[i].tensor === chosen.tensor && castKey(slots[i]) === castKey(chosen);
  const shown = groups.map((group) => ({ ...group, members: group.members.filter(([i]) => same(i)) })).filter((g) => g.members.length);
  const total = shown.reduce((sum, group) => sum + group.members.length, 0);
  const high = clamp(560 / total, 4, 22), room = Math.max(280, scroll.clientWidth || 1000);
  const long = Math.max(...shown.flatMap((group) => group.members.map(([, label]) => label.length)));
  const letters = clamp(long, 3, room < 600 ? 12 : 30), left = letters * 6.6 + 12;
  const across = (room - left - 4) / looks.length, focus = document.activeElement?.closest?.("#heat svg");
  const bottom = shown.length * 20 + total * high;
  const { svg, width } = canvas(scroll, bottom + 22, `Heat map of ${metric.name}: layers down, looks across. Arrow keys move, Enter goes to the tensor.`);
  svg.setAttribute("tabindex", 0); svg.setAttribute("role", "application"); svg.setAttribute("aria-describedby", "cell");
  const paths = {}, name = metric.warns ? "h" : "n";
  let y = 0;
  heatRows = [];
  for (const group of shown) {
    put(svg, "text", { class: "group", x: 0, y: y + 15 }, `${group.kind}${group.title ? "  " + elide(group.title, Math.floor(width / 8)) : ""}`);
    y += 20;
    let free = 0;
    for (const [slot, label] of group.members) {
      if (y >= free) { put(svg, "text", { x: left - 8, y: y + high / 2 + 4, "text-anchor": "end" }, elide(label, letters)); free = y + 12; }
      put(svg, "rect", { class: "empty", x: left, y, width: width - left - 4, height: Math.max(3, high - 1) });
      for (let look = 0; look < looks.length; look++) {
        const share = level(state.metric, slot, valueAt(state.metric, slot, look));
        if (share === null) continue;
        const key = name + shade(share);
        paths[key] = (paths[key] ?? "") + `M${(left + look * across).toFixed(2)} ${y.toFixed(2)}h${(across - (across > 6 ? 1 : 0)).toFixed(2)}v${Math.max(3, high - 1).toFixed(2)}h${(-(across - (across > 6 ? 1 : 0))).toFixed(2)}z`;
      }
      heatRows.push({ slot, y });
      y += high;
    }
  }
  for (const [css, d] of Object.entries(paths)) put(svg, "path", { class: css, d });
  const stride = Math.ceil(looks.length / Math.max(2, (width - left) / 70));
  looks.forEach(([first], look) => {
    if (look % stride === 0) put(svg, "text", { x: left + (look + 0.5) * across, y: bottom + 16, "text-anchor": "middle" }, first.toLocaleString("en"));
  });
  const row = heatRows.find((r) => r.slot === state.slot);
  if (row) put(svg, "rect", { class: "selected", x: left + state.look * across - 1, y: row.y - 1, width: Math.max(4, across + 1), height: Math.max(5, high + 1) });
  const at = (px, py) => {
    const found = heatRows.find((r) => py >= r.y && py < r.y + high), look = Math.floor((px - left) / across);
    return found && look >= 0 && look < looks.length ? { slot: found.slot, look } : null;
  };
  hover(svg, (px, py) => { const cell = at(px, py); return cell && cellText(cell).split("; "); });
  svg.addEventListener("click", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()), cell = at(point.x, point.y);
    if (cell) select(cell);
  });
  svg.addEventListener("keydown", heatKey);
  if (focus) svg.focus({ preventScroll: true });
  drawLegend(metric);
}
function heatKey(event) {
  const row = heatRows.findIndex((r) => r.slot === state.slot), last = looks.length - 1;
  const moves = {
    ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    PageUp: [-heatRows.length, 0], PageDown: [heatRows.length, 0], Home: [0, -last], End: [0, last],
  };
  if (event.key === "Enter") { $("tensor-title").focus(); event.preventDefault(); }
  if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const [down, right] = moves[event.key];
  select({ slot: heatRows[clamp(row + down, 0, heatRows.length - 1)].slot, look: clamp(state.look + right, 0, last) });
}
function cellText({ slot, look }) {
  const step = stepAt(slot, look), { name, unit } = metrics[state.metric];
  const when = step < 0 ? `not looked at around step ${looks[look][0]}` : `step ${step.toLocaleString("en")}; ${name} ${human(valueAt(state.metric, slot, look), unit)}`;
  return `${slots[slot].symbol} of ${slots[slot].layer}; ${when}`;
}
function drawLegend(metric) {
  const host = $("legend"), low = metric.below ? "format’s own or better" : human(metric.calm, metric.unit);
  const high = metric.below ? `${metric.alarm} dB below it` : human(metric.alarm, metric.unit);
  host.replaceChildren();
  put(host, "span", {}, metric.warns ? `calm: ${low}` : low);
  for (let i = 0; i < 9; i++) put(host, "i", { class: (metric.warns ? "h" : "n") + i });
  put(host, "span", {}, metric.warns ? `alarming: ${high}` : high);
  put(host, "span", { class: "muted" }, `${metric.log ? "logarithmic. " : ""}${metric.meaning}`);
}

// ---- the tensor of the selected cell ------------------------------------------------------------------------------

function drawTensor() {
  const slot = slots[state.slot], step = stepAt(state.slot, state.look);
  $("tensor-title").textContent = `${slot.symbol} of ${slot.layer}`;
  $("tensor-cast").textContent = `${castOf(slot)}, ${slot.scaling} scaling. ` + (step < 0 ? "Not looked at here." : `Step ${step.toLocaleString("en")}.`);
  $("cell").textContent = cellText(state);
  $("look").max = looks.length - 1;
  $("look").value = state.look;
  $("look-text").textContent = step < 0 ? "–" : step.toLocaleString("en");
  const table = $("numbers-table").tBodies[0];
  table.replaceChildren();
  metrics.forEach(({ name, unit, meaning }, i) => {
    const value = valueAt(i, state.slot, state.look), share = metrics[i].warns ? level(i, state.slot, value) : null;
    const line = put(table, "tr");
    put(line, "th", { scope: "row" }, name);
    put(line, "td", { class: `num l${share === null ? 0 : Math.min(3, Math.floor(share * 4))}`, "data-metric": name }, human(value, unit));
    put(line, "td", { class: "note" }, unit.startsWith("of x") ? `${meaning}; unit ${unit}` : meaning);
  });
  const mine = histograms.filter((h) => h.slot === state.slot);
  const nearest = mine.sort((a, b) => Math.abs(a.look - state.look) - Math.abs(b.look - state.look))[0];
  $("histograms").hidden = !nearest;
  $("no-histograms").hidden = Boolean(nearest);
  drawScales();
  if (!nearest) return;
  const there = stepAt(nearest.slot, nearest.look);
  $("histogram-step").textContent = nearest.look === state.look ? `Step ${there.toLocaleString("en")}.` : `The nearest histogram on this page: step ${there.toLocaleString("en")}.`;
  windowOf = newWindow(nearest, slot);
  if (formats[slot.format]) $("format").value = slot.format;
  $("shift").value = 0;
  drawWindow();
  const floor = facts.floor[state.slot];
  drawBars($("row-sqnr"), nearest.rows, 0.5, "Rows by their own SQNR", "dB", floor, `a bell-shaped tensor in ${slot.format}`);
  drawBars($("spread"), nearest.spread, 1, "1x128 blocks by how far their amax lies below the tensor’s", "octaves below", null, "");
}
let windowOf = null;
// Bins of a quarter octave: edges in |x| and counts; and the scale that the cast used, or that current scaling would.
function newWindow({ look, slot, exponents }, { format }) {
  const edge = (bin) => 2 ** (Math.floor(bin / 4) - 127) * (1 + (bin % 4) / 4);
  const bins = [...exponents.counts].map((count, i) => ({ low: edge(exponents.first + i), high: edge(exponents.first + i + 1), count }));
  const used = named("scale_min", slot, look), amax = named("amax", slot, look), several = named("scale_max", slot, look) > used * 1.001;
  const scale = used > 0 ? used : (formats[format] ?? formats.E4M3).max / (amax || bins.at(-1)?.high || 1);
  return { bins, scale, known: used > 0, several, slot, look, total: bins.reduce((sum, bin) => sum + bin.count, 0) };
}
// What one scale and a format would do, from the bins alone: numbers are even within a bin, errors even within a step.
function predict({ bins, total }, fmt, scale) {
  const gone = fmt.subnormal / 2;
  const part = (bin, low, high) => bin.count * clamp((Math.min(high, bin.high * scale) - Math.max(low, bin.low * scale)) / ((bin.high - bin.low) * scale), 0, 1);
  let flushed = 0, small = 0, clipped = 0, signal = 0, noise = 0;
  for (const bin of bins) {
    flushed += part(bin, 0, gone);
    small += part(bin, gone, fmt.normal);
    clipped += part(bin, fmt.clip, Infinity);
    const y = (bin.low + bin.high) / 2 * scale, step = Math.max(fmt.subnormal, fmt.eps * 2 ** Math.floor(Math.log2(y)));
    signal += bin.count * y * y;
    noise += bin.count * (y < gone ? y * y : y > fmt.clip ? (y - fmt.max) ** 2 : step * step / 12);
  }
  return { underflow: 100 * flushed / total, subnormal: 100 * small / total, clipped: 100 * clipped / total, sqnr: 10 * Math.log10(signal / noise) };
}
function drawWindow() {
  const fmt = formats[$("format").value], shift = Number($("shift").value), { bins, total, scale, known, several } = windowOf;
  const used = scale * 2 ** shift, told = predict(windowOf, fmt, used);
  const { svg, width } = canvas($("window"), 250, "Elements by magnitude, over what the format can hold at this scale");
  const left = 52, right = 10, top = 38, base = 214;
  const octaves = new Map();
  for (const bin of bins) { const e = Math.floor(Math.log2(bin.low) + 1e-9); octaves.set(e, (octaves.get(e) ?? 0) + bin.count); }
  const bounds = [fmt.subnormal / 2, fmt.normal, fmt.clip].map((y) => Math.log2(y / used));
  const x0 = Math.min(...octaves.keys(), Math.floor(bounds[0]) - 2), x1 = Math.max(...octaves.keys(), Math.ceil(bounds[2])) + 2;
  const X = (x) => left + (clamp(x, x0, x1) - x0) / (x1 - x0) * (width - left - right);
  const least = Math.min(-4, Math.floor(Math.log10(1 / total)));
  const Y = (share) => base - clamp(1 - Math.log10(share) / least, 0, 1) * (base - top);
  const zones = [["cast to 0", "gone", x0, bounds[0]], ["subnormal", "small", bounds[0], bounds[1]], ["normal", "normal", bounds[1], bounds[2]], ["clipped", "clip", bounds[2], x1]];
  for (const [text, css, a, b] of zones) {
    put(svg, "rect", { class: `zone ${css}`, x: X(a), y: top - 20, width: Math.max(0, X(b) - X(a)), height: base - top + 20 });
    if (X(b) - X(a) > text.length * 6) put(svg, "text", { class: "name", x: (X(a) + X(b)) / 2, y: top - 6, "text-anchor": "middle" }, text);
  }
  for (let power = 0; power >= least; power -= 2) {
    put(svg, "line", { class: "grid", x1: left, x2: width - right, y1: Y(10 ** power), y2: Y(10 ** power) });
    put(svg, "text", { x: left - 6, y: Y(10 ** power) + 4, "text-anchor": "end" }, `${power > -5 ? 100 * 10 ** power : "1e−" + (-power - 2)} %`);
  }
  const kinds = [["gone", -Infinity, bounds[0]], ["small", bounds[0], bounds[1]], ["normal", bounds[1], bounds[2]], ["clip", bounds[2], Infinity]];
  for (const [e, count] of octaves) {
    const css = kinds.find(([, a, b]) => e + 0.5 >= a && e + 0.5 < b)[0], bar = { x: X(e) + 0.5, width: Math.max(1, X(e + 1) - X(e) - 1), y: Y(count / total), height: base - Y(count / total) };
    put(put(svg, "rect", { class: `bar ${css}`, ...bar }), "title", {}, `2^${e} to 2^${e + 1}: ${human(100 * count / total, "%")}`);
  }
  for (const x of ticks(x0, x1, Math.max(3, width / 90)).filter(Number.isInteger)) put(svg, "text", { x: X(x), y: base + 16, "text-anchor": "middle" }, `2^${x}`.replace("-", "−"));
  put(svg, "text", { x: width - right, y: base + 32, "text-anchor": "end" }, "magnitude of the elements that are not 0");
  put(svg, "text", { x: 0, y: 10 }, "share of elements, logarithmic");
  $("shift-text").textContent = `${human(used)}, ${shift ? `2^${shift} of` : ""} ${known ? (several ? "the smallest scale used" : "the scale used") : "what current scaling would use"}`.replace("-", "−").replace("  ", " ");
  const at = (name) => named(name, windowOf.slot, windowOf.look);
  const rows = [["cast to 0", told.underflow, at("underflow_pct"), "%"], ["subnormal", told.subnormal, at("subnormal_pct"), "%"], ["clipped", told.clipped, at("overflow_pct"), "%"], ["SQNR", told.sqnr, at("sqnr_db"), "dB"]];
  const body = $("predicted").tBodies[0];
  body.replaceChildren();
  for (const [name, value, measured, unit] of rows) {
    const line = put(body, "tr");
    put(line, "th", { scope: "row" }, name);
    put(line, "td", { class: "num", "data-predicted": name }, human(value, unit));
    put(line, "td", { class: "num muted" }, human(measured, unit));
  }
  fill("window-table", ["magnitude", "share of elements"], [...octaves].map(([e, count]) => [`2^${e} to 2^${e + 1}`, human(100 * count / total, "%")]));
}
function drawBars(host, { first, counts }, width1, title, unit, line, lineText) {
  const { svg, width } = canvas(host, 190, title), left = 44, right = 10, base = 156, total = counts.reduce((a, b) => a + b, 0);
  const wide = Math.max(1, Math.ceil(counts.length / 48)), bins = [];
  for (let i = 0; i < counts.length; i += wide) bins.push([(first + i) * width1, counts.slice(i, i + wide).reduce((a, b) => a + b, 0) / total]);
  const x0 = Math.min(bins[0]?.[0] ?? 0, line ?? Infinity) - width1, x1 = Math.max((bins.at(-1)?.[0] ?? 0) + wide * width1, line ?? -Infinity) + width1;
  const top = Math.max(...bins.map(([, share]) => share), 1e-9), X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  put(svg, "text", { class: "name", x: 0, y: 12 }, title);
  for (const share of ticks(0, top, 3)) {
    const y = base - share / top * 116;
    put(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y });
    put(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, human(100 * share, "%"));
  }
  for (const [x, share] of bins) {
    const bar = put(svg, "rect", { class: "bar normal", x: X(x), width: Math.max(1, X(x + wide * width1) - X(x) - 1), y: base - share / top * 116, height: share / top * 116 });
    put(bar, "title", {}, `${human(x)} to ${human(x + wide * width1, unit)}: ${human(100 * share, "%")}`);
  }
  for (const x of ticks(x0, x1, 6)) put(svg, "text", { x: X(x), y: base + 16, "text-anchor": "middle" }, human(x).replace(/\.0+$/, ""));
  put(svg, "text", { x: width - right, y: base + 31, "text-anchor": "end" }, unit);
  if (line !== null) {
    put(svg, "line", { class: "cross", x1: X(line), x2: X(line), y1: 28, y2: base });
    put(svg, "text", { x: X(line) - 5, y: 30, "text-anchor": "end" }, lineText);
  }
  fill(host.id + "-table", [unit, "share"], bins.map(([x, share]) => [`${human(x)} to ${human(x + wide * width1)}`, human(100 * share, "%")]));
}
function drawScales() {
  const fine = facts.series, xs = [], amax = [], high = [], low = [];
  const top = formats[slots[state.slot].format]?.max ?? NaN;
  const place = fine ? fine.slots.indexOf(state.slot) : -1, start = (metrics.length + 1) * size, each = fine ? fine.slots.length * fine.looks : 0;
  const read = fine && place >= 0 ? (name, i) => fine.names.includes(name) ? numbers[start + fine.names.indexOf(name) * each + place * fine.looks + i] : NaN : (name, i) => named(name, state.slot, i);
  for (let i = 0; i < (fine ? fine.looks : looks.length); i++) {
    const step = fine && place >= 0 ? numbers[start + fine.names.length * each + place * fine.looks + i] : stepAt(state.slot, i);
    if (!(step >= 0)) continue;
    xs.push(step); amax.push(read("amax", i)); high.push(top / read("scale_min", i)); low.push(top / read("scale_max", i));
  }
  const series = [{ name: "largest number that fits, at the scale used", xs, ys: high, css: "s3" }, { name: "amax", xs, ys: amax, css: "s1" }];
  if (low.some((v, i) => v < high[i] * 0.999)) series.unshift({ name: "… at the largest scale of a block", xs, ys: low, css: "faint" });
  const known = series.filter((s) => s.ys.some(Number.isFinite));
  $("scales").hidden = !known.length;
  if (!known.length) return;
  const frame = lines($("scales"), { height: 210, label: "amax and the largest number that fits, by step", series: known, x: [Math.min(...xs), Math.max(...xs)], log: true });
  const step = stepAt(state.slot, state.look);
  if (step >= 0) put(frame.svg, "line", { class: "now", x1: frame.X(step), x2: frame.X(step), y1: 22, y2: 186 });
  fill("scales-table", ["step", "amax", "largest number that fits"], xs.map((x, i) => [x.toLocaleString("en"), human(amax[i]), human(high[i])]));
}
function fill(id, heads, rows) {
  const table = $(id);
  table.tHead?.remove(); table.tBodies[0]?.remove();
  const head = put(put(table, "thead"), "tr"), body = put(table, "tbody");
  for (const text of heads) put(head, "th", { scope: "col", class: "num" }, text);
  for (const row of rows) { const line = put(body, "tr"); for (const text of row) put(line, "td", { class: "num" }, text); }
}
function fillHeatTable() {
  const metric = metrics[state.metric], step = ([first, last]) => first === last ? `${first}` : `${first} to ${last}`;
  fill("heat-table", ["layer", ...looks.map(step)], heatRows.map(({ slot }) => [slots[slot].layer, ...looks.map((_, look) => human(valueAt(state.metric, slot, look), metric.unit))]));
}

// ---- what is selected ---------------------------------------------------------------------------------------------

function options(host, entries, chosen) {
  host.replaceChildren();
  for (const [value, text] of entries) put(host, "option", value === chosen ? { value, selected: "" } : { value }, text);
  host.closest("label").hidden = entries.length < 2;
}
function select(changes, remember = true) {
  state = { ...state, ...changes };
  const chosen = slots[state.slot];
  options($("metric"), metrics.map(({ name }) => [name, name]), metrics[state.metric].name);
  options($("tensor"), [...new Map(slots.map((s) => [s.tensor, s.symbol]))], chosen.tensor);
  options($("cast"), [...new Map(slots.filter((s) => s.tensor === chosen.tensor).map((s) => [castKey(s), castOf(s)]))], castKey(chosen));
  drawHeat();
  drawTensor();
  if ($("heat-details").open) fillHeatTable();
  if (remember) history.replaceState(null, "", `#slot=${state.slot}&metric=${metrics[state.metric].name}&step=${Math.max(stepAt(state.slot, state.look), looks[state.look][0])}`);
}
// The slot most like the selected one that this holds for.
function similar(wanted) {
  const here = slots[state.slot], alike = (s) => (s.layer === here.layer) + (castKey(s) === castKey(here)) / 2 + (s.direction === here.direction) / 4;
  return slots.map((s, i) => [wanted(s) ? alike(s) : -1, i]).reduce((best, pair) => pair[0] > best[0] ? pair : best)[1];
}
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1)), changes = {};
  const slot = Number(asked.get("slot") ?? NaN), step = Number(asked.get("step") ?? NaN), look = Number(asked.get("look") ?? NaN);
  if (slots[slot]) changes.slot = slot;
  if (asked.get("metric") in metricAt) changes.metric = metricAt[asked.get("metric")];
  if (looks[look]) changes.look = look;
  if (!Number.isNaN(step)) changes.look = looks.reduce((best, [first], i) => first <= step ? i : best, 0);
  return changes;
}

// ---- patches ------------------------------------------------------------------------------------------------------

for (const box of document.querySelectorAll(".patches")) {
  const tabs = [...box.querySelectorAll("[role=tab]")], panels = [...box.querySelectorAll("[role=tabpanel]")];
  const show = (wanted) => tabs.forEach((tab, i) => {
    tab.setAttribute("aria-selected", i === wanted); tab.tabIndex = i === wanted ? 0 : -1; panels[i].hidden = i !== wanted;
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
for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  const text = button.parentElement.querySelector("pre").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // file:// pages may not have it
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area); area.select(); document.execCommand("copy"); area.remove(); button.focus();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
});

// ---- start --------------------------------------------------------------------------------------------------------

drawTime();
if (slots.length && metrics.length) {
  options($("format"), Object.keys(formats).map((name) => [name, name]), "E4M3");
  state = { slot: facts.start.slot, look: facts.start.look, metric: metricAt[facts.start.metric] ?? 0 };
  select(fromAddress(), false);
  $("metric").addEventListener("change", (event) => select({ metric: metricAt[event.target.value] }));
  $("tensor").addEventListener("change", (event) => select({ slot: similar((s) => s.tensor === event.target.value) }));
  $("cast").addEventListener("change", (event) => select({ slot: similar((s) => s.tensor === slots[state.slot].tensor && castKey(s) === event.target.value) }));
  $("look").addEventListener("input", (event) => select({ look: Number(event.target.value) }));
  $("format").addEventListener("change", drawWindow);
  $("shift").addEventListener("input", drawWindow);
  $("reset").addEventListener("click", () => { $("shift").value = 0; drawWindow(); });
  $("heat-details").addEventListener("toggle", fillHeatTable);
  addEventListener("hashchange", () => { if (location.hash.includes("=")) { select(fromAddress(), false); $("heat-map").scrollIntoView(); } });
}
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawTime(); if (state) select({}, false); } });
document.documentElement.dataset.drawn = "yes";
})();
