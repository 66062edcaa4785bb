// What the explorer shows. engine.js computes; chart.js and draw.js draw. The page keeps its language in the address:
// explorer.html#lang=zh-CN.
(() => {
const tables = JSON.parse($("tables").textContent), engine = makeEngine(tables), { formats, recipes } = tables;
const zh = () => document.documentElement.lang.startsWith("zh"), say = (en, chinese) => zh() ? chinese : en;
const sup = (n) => String(n).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"["0123456789-".indexOf(c)]), power = (n) => `2${sup(n)}`;
const percent = (share) => human(100 * share, "%");
const options = (select, entries) => {
  const chosen = select.value;
  select.replaceChildren();
  for (const [value, text] of entries) put(select, "option", { value }, text);
  if (entries.some(([value]) => value === chosen)) select.value = chosen;
};
const on = (id, event, act) => $(id).addEventListener(event, act);
// A pointer that is down or comes down on a picture; act(x, y) in the units of its viewBox.
function drag(host, act) {
  let held = false;
  const move = (event) => { if (held && host.firstChild) { const { x, y } = pointIn(host.firstChild, event); act(x, y); } };
  host.addEventListener("pointerdown", (event) => { held = true; host.setPointerCapture(event.pointerId); move(event); });
  host.addEventListener("pointermove", move);
  for (const end of ["pointerup", "pointercancel"]) host.addEventListener(end, () => { held = false; });
}

// ---- one number ---------------------------------------------------------------------------------------------------

const LOW = -24, HIGH = 20, ROW = 26, number = { x: Math.fround(0.3) };
const limits = (format) => ({ dead: format.has_zero ? format.min_subnormal / 2 : 0, sub: format.min_normal, end: format.max });
function zoneOf(x, y, format) {
  if (x !== 0 && y === 0) return ["dead", say("becomes 0", "归零")];
  if (Math.abs(x) > format.max || x < format.lowest) return ["clip", say("clipped", "截断")];
  if (Math.abs(y) < format.min_normal && y !== 0) return ["sub", say("subnormal", "次正规数")];
  return ["normal", x === 0 && y === 0 ? say("zero", "零") : say("normal", "正规数")];
}
function drawLine() {
  const names = Object.keys(formats), left = 82, right = 10, bottom = 22, height = names.length * ROW + bottom;
  const { svg, width } = canvas($("line"), height, say("A line for each format: where numbers vanish, lose digits, are kept or clipped", "每种格式一条线：数在哪里归零、丢失位数、保留或截断"));
  const X = (t) => left + (clamp(t, LOW, HIGH) - LOW) / (HIGH - LOW) * (width - left - right), dense = (width - left - right) / (HIGH - LOW);
  names.forEach((name, row) => {
    const format = formats[name], { dead, sub, end } = limits(format), y = row * ROW + 5, at = (v) => X(v > 0 ? Math.log2(v) : LOW);
    const ends = [["dead", LOW, dead], ["sub", dead, sub], ["normal", sub, end], ["clip", end, Infinity]];
    put(svg, "text", { class: "name", x: 0, y: y + 12 }, name);
    for (const [zone, from, to] of ends) {
      const [a, b] = [zone === "dead" ? X(LOW) : at(from), to === Infinity ? X(HIGH) : at(to)];
      if (b > a) put(svg, "rect", { class: `zone ${zone}`, x: a, width: b - a, y, height: 16 });
    }
    if (format.bits <= 8 && dense / 2 ** format.mantissa_bits > 2) {
      const codes = Array.from({ length: 2 ** (format.bits - Number(format.signed)) }, (_, code) => engine.decode(code, format));
      const marks = codes.filter((v) => v >= 2 ** LOW && v <= 2 ** HIGH).map((v) => `M${at(v).toFixed(1)} ${y + 4}v8`);
      put(svg, "path", { class: "codes", d: marks.join("") });
    }
    const v = Math.abs(landed(format));
    put(svg, "circle", { class: v ? "lands" : "gone", cx: at(v), cy: y + 8, r: 4.5 });
  });
  const size = Math.abs(scaled()), x = X(size > 0 ? Math.log2(size) : LOW);
  put(svg, "line", { class: "hand", x1: x, x2: x, y1: 0, y2: height - bottom });
  for (let t = LOW; t <= HIGH; t += width > 600 ? 4 : 11) put(svg, "text", { x: X(t), y: height - 4, "text-anchor": t === LOW ? "start" : t === HIGH ? "end" : "middle" }, power(t));
  svg.dataset.left = left;
  svg.dataset.span = width - left - right;
}
const scaled = () => Math.fround(number.x * 2 ** Number($("factor").value));
const landed = (format) => engine.round(Number.isFinite(scaled()) || !format.has_nan ? scaled() : NaN, format);
// The numbers of the format just below and above y.
function neighbours(y, format) {
  const finite = (v) => Number.isFinite(v) ? v : null, code = engine.encode(y, format);
  const half = 2 ** (format.bits - 1), size = format.signed ? code % half : code, sign = format.signed && code >= half ? -1 : 1;
  const at = (n) => n >= 0 && n < 2 ** (format.bits - Number(format.signed)) ? finite(sign * engine.decode(n, format)) : null;
  const around = size === 0 && format.signed ? [-format.min_subnormal, at(1)] : [at(size - 1), at(size + 1)];
  return sign < 0 && size > 0 ? around.reverse() : around;
}
function bitsOf(parent, code, format) {
  const text = code.toString(2).padStart(format.bits, "0"), e = Number(format.signed), m = e + format.exponent_bits;
  const cell = put(parent, "code", { class: "bits" });
  for (const [css, part] of [["s", text.slice(0, e)], ["e", text.slice(e, m)], ["m", text.slice(m)]]) {
    if (part) put(cell, "b", { class: css }, part.length > 10 ? part.slice(0, 8) + "…" : part);
  }
}
function showNumber() {
  const x = scaled(), exponent = Number($("factor").value), undo = 2 ** -exponent, table = $("codes"), exact = (v) => v === null ? "–" : String(Number(v.toPrecision(7)));
  $("factor-now").textContent = power(exponent);
  if (document.activeElement !== $("octave")) $("octave").value = clamp(Math.log2(Math.abs(number.x) || 2 ** LOW), LOW, HIGH);
  $("octave").setAttribute("aria-valuetext", exact(number.x));
  if (document.activeElement !== $("exact")) $("exact").value = Number(number.x.toPrecision(7));
  drawLine();
  const heads = [say("format", "格式"), say("value", "数值"), say("error", "误差"), "", say("code", "编码"), say("bits", "位"), say("below", "下邻"), say("above", "上邻")];
  fill(table, heads, []);
  const kept = [];
  for (const [name, format] of Object.entries(formats)) {
    const y = landed(format), code = engine.encode(y, format), [zone, told] = zoneOf(x, y, format), row = put(table.tBodies[0], "tr");
    put(row, "th", { scope: "row" }, name);
    put(row, "td", {}, exact(y * undo));
    put(row, "td", {}, x === 0 ? "–" : percent(Math.abs(y - x) / Math.abs(x)));
    put(row, "td", { class: `zone-name ${zone}` }, told);
    put(put(row, "td"), "code", {}, "0x" + code.toString(16).toUpperCase().padStart(Math.ceil(format.bits / 4), "0"));
    bitsOf(put(row, "td"), code, format);
    for (const v of y !== y ? [null, null] : neighbours(y, format)) put(row, "td", {}, exact(v === null ? null : v * undo));
    if (name === "E4M3" || name === "E5M2" || name === "E2M1") kept.push(`${name} ${exact(y * undo)}`);
  }
  $("number-now").textContent = `x = ${exact(number.x)}${exponent ? ` · ${say("scaled", "缩放后")} ${exact(x)}` : ""}: ${kept.join(", ")}`;
}
function setOctave(t) {
  number.x = Math.fround((number.x < 0 ? -1 : 1) * 2 ** clamp(Math.round(t * 64) / 64, LOW, HIGH));
  showNumber();
}
on("octave", "input", () => setOctave(Number($("octave").value)));
on("exact", "input", () => { if ($("exact").value !== "") { number.x = Math.fround(Number($("exact").value)); showNumber(); } });
on("factor", "input", showNumber);
drag($("line"), (x) => {
  const { left, span } = $("line").firstChild.dataset;
  setOctave(LOW + (x - left) / span * (HIGH - LOW));
});

// ---- a layer and its outlier --------------------------------------------------------------------------------------

const TOKENS = 32, IN = 64, OUT = 32, OPERANDS = ["xRow", "xCol", "wRow", "wCol", "dyRow", "dyCol"], RESULTS = ["y", "dx", "dw"], COLUMNS = [...RESULTS, ...OPERANDS];
const TITLES = { xRow: "x", xCol: "xᵀ", wRow: "w", wCol: "wᵀ", dyRow: "dy", dyCol: "dyᵀ", y: "y", dx: "dx", dw: "dw" };
const draws = (word, rows, cols, size) => engine.toBF16(engine.matrix(rows, cols, engine.normals([7, word], rows * cols).map((v) => v * size)));
const plainLayer = { x: draws(1, TOKENS, IN, 1), w: draws(2, OUT, IN, 0.125), dy: draws(3, TOKENS, OUT, 2 ** -10) };
const layer = { recipe: "mxfp8", at: { x: [12, 21], w: [12, 21], dy: [12, 21] }, found: {} };
const METRICS = {
  others: ["SQNR of the others, dB", "其余数的 SQNR，dB"], sqnr: ["SQNR of all, dB", "全部的 SQNR，dB"], cosine: ["cosine", "余弦"],
  underflow: ["became 0, %", "归零，%"], clipped: ["clipped, %", "截断，%"],
};
const NOTES = {
  others: ["All numbers but the outlier, and all results that it does not enter. A rotated operand is rotated back first.", "除离群值以外的数，以及它没有参与的结果。经旋转的操作数先旋转回来再测量。"],
  sqnr: ["The outlier dominates this ratio: it may look well while all others are lost.", "这个比值由离群值主导：其余的数全部丢失时，它仍可能很好看。"],
  cosine: ["The cosine, too, is mostly that of the outlier.", "余弦也主要由离群值决定。"],
  underflow: ["Numbers that were not 0 and whose code is. Results of GEMMs are not cast.", "原本不为 0 而编码为 0 的数。GEMM 的结果不做转换。"],
  clipped: ["Numbers beyond the largest one of the format under their scale.", "按其缩放超出格式最大值的数。"],
};
const operandOf = { xRow: "x", xCol: "x", wRow: "w", wCol: "w", dyRow: "dy", dyCol: "dy" };
// The product a b.T in FP64: what no format has touched.
function truth(a, b) {
  const y = new Float64Array(a.rows * b.rows);
  for (let i = 0; i < a.rows; i++) for (let j = 0; j < b.rows; j++) {
    for (let k = 0; k < a.cols; k++) y[i * b.rows + j] += a.data[i * a.cols + k] * b.data[j * b.cols + k];
  }
  return y;
}
function errors(exact, got, skip) {
  let signal = 0, noise = 0, dot = 0, size = 0;
  exact.forEach((v, i) => {
    if (skip(i)) return;
    signal += v * v;
    noise += (v - got[i]) ** 2;
    dot += v * got[i];
    size += got[i] * got[i];
  });
  return { sqnr: 10 * Math.log10(signal / noise), cosine: dot / Math.sqrt(signal * size) };
}
function measureOperand(q, x, name, where) {
  if (!q.spec) return { q, others: Infinity, sqnr: Infinity, cosine: 1, underflow: 0, clipped: 0 };
  const got = engine.recovered(q, x).data, own = where === operandOf[name] ? outlierAt(name) : -1;
  const whole = errors(x.data, got, () => false), max = formats[q.spec.format].max, at = (i) => q.grid.of(Math.floor(i / q.cols), i % q.cols);
  let nonzero = 0, lost = 0, clipped = 0;
  q.cast.data.forEach((v, i) => {
    if (v !== 0) nonzero++;
    if (v !== 0 && q.data[i] === 0) lost++;
    if (Math.abs(v) * q.scale[at(i)] > max * (1 + 2 ** -20)) clipped++;
  });
  return { q, gone: lost, ...whole, others: errors(x.data, got, (i) => i === own).sqnr, underflow: 100 * lost / nonzero, clipped: 100 * clipped / q.data.length };
}
// The tensor of an operand before its cast.
const turned = (name) => name.endsWith("Row") ? layer.tensors[operandOf[name]] : engine.transpose(layer.tensors[operandOf[name]]);
// The outlier's place in an operand: in x.T it is turned.
function outlierAt(name) {
  const where = operandOf[name], [i, j] = layer.at[where], m = plainLayer[where];
  return name.endsWith("Row") ? i * m.cols + j : j * m.rows + i;
}
// Whether the outlier at (i, j) enters a result at (row, column).
function entered(result, where, [i, j]) {
  const rule = { y: { x: (r) => r === i, w: (r, c) => c === i }, dx: { dy: (r) => r === i, w: (r, c) => c === j }, dw: { x: (r, c) => c === j, dy: (r) => r === j } };
  return rule[result][where] ?? (() => false);
}
function computeLayer() {
  const where = $("where").value, place = layer.at[where], tensors = { ...plainLayer }, big = tensors[where];
  tensors[where] = engine.mapped(big, (v, i) => i === place[0] * big.cols + place[1] ? Math.sign(v || 1) * 2 ** Math.round(Math.log2(Math.abs(plainScale[where]))) * 2 ** Number($("octaves").value) : v);
  const { x, w, dy } = tensors, t = engine.transpose;
  const exact = { y: truth(x, w), dx: truth(dy, t(w)), dw: truth(t(dy), t(x)) };
  const before = Object.fromEntries(Object.entries({ input: "x", weight: "w", grad_output: "dy" }).map(([tensor, name]) =>
    [tensor, plainLayer[name].data.reduce((top, v) => Math.max(top, Math.abs(v)), 0)]));
  layer.tensors = tensors;
  for (const [name, recipe] of Object.entries(recipes)) {
    let drawn = 0;
    const cells = { input: recipe.fprop.lhs, weight: recipe.fprop.rhs, grad_output: recipe.dgrad.lhs };
    const scales = Object.fromEntries(Object.entries(cells).map(([tensor, spec]) => [tensor, spec && spec.scaling !== "current" ? engine.fromWindow([before[tensor]], spec) : null]));
    const all = engine.linear(x, w, dy, recipe, () => [drawn++, 4], scales), found = {};
    for (const one of OPERANDS) found[one] = measureOperand(all[one], turned(one), one, where);
    for (const one of RESULTS) {
      const { cols, data } = all[one], enters = entered(one, where, place), whole = errors(exact[one], data, () => false);
      found[one] = { ...whole, others: errors(exact[one], data, (i) => enters(Math.floor(i / cols), i % cols)).sqnr };
    }
    layer.found[name] = found;
  }
}
const plainScale = { x: 1, w: 0.125, dy: 2 ** -10 };
const LEVELS = { others: [24, 14, 8], sqnr: [24, 14, 8], cosine: [0.9995, 0.995, 0.98], underflow: [1, 5, 20], clipped: [0.001, 1, 5] };
function levelOf(metric, v) {
  const better = metric === "underflow" || metric === "clipped" ? (a, b) => a < b : (a, b) => a >= b;
  const found = LEVELS[metric].findIndex((limit) => better(v, limit));
  return found === 0 ? "" : `l${found < 0 ? 3 : found}`;
}
function showRecipes() {
  const metric = $("metric").value, table = $("recipes");
  fill(table, [say("recipe", "配方"), ...COLUMNS.map((name) => TITLES[name])], []);
  for (const [name, found] of Object.entries(layer.found)) {
    const row = put(table.tBodies[0], "tr", { "aria-selected": name === layer.recipe });
    const button = put(put(row, "th", { scope: "row" }), "button", { type: "button", "aria-pressed": name === layer.recipe }, name);
    button.addEventListener("click", () => { layer.recipe = name; showLayer(); [...table.querySelectorAll("button")].find((b) => b.textContent === name).focus(); });
    for (const one of COLUMNS) {
      const v = found[one][metric], shown = v === undefined ? "–" : v === Infinity ? say("exact", "精确") : metric === "cosine" ? v.toFixed(4) : v.toFixed(1);
      put(row, "td", { class: `${v === undefined ? "" : levelOf(metric, v)} ${one === "xRow" ? "first" : ""}` }, shown);
    }
  }
  $("metric-note").textContent = say(...NOTES[metric]);
}
// A matrix as squares: shades of magnitude, what was lost, the blocks, and the outlier. Cells of a class are one path.
function drawMatrix(host, x, { label, marks = () => null, grid = null, outlier = -1, describe }) {
  const { svg, width } = canvas(host, 10, label), side = width / x.cols, height = side * x.rows, paths = {};
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const sizes = Array.from(x.data, Math.abs).filter((v) => v > 0).sort((a, b) => a - b), middle = sizes[sizes.length >> 1] || 1;
  x.data.forEach((v, i) => {
    const css = marks(i) ?? `n${v === 0 ? 0 : clamp(Math.round(Math.log2(Math.abs(v) / middle)) + 4, 1, 8)}`;
    paths[css] = (paths[css] ?? "") + `M${(i % x.cols * side).toFixed(2)} ${(Math.floor(i / x.cols) * side).toFixed(2)}h${side.toFixed(2)}v${side.toFixed(2)}h-${side.toFixed(2)}z`;
  });
  for (const [css, d] of Object.entries(paths)) put(svg, "path", { class: `cell ${css}`, d, "shape-rendering": "crispEdges" });
  if (grid && grid.count > 1) {
    let d = "";
    for (let i = 1; i < grid.down; i++) d += `M0 ${i * grid.high * side}H${width}`;
    for (let j = 1; j < grid.across; j++) d += `M${j * grid.wide * side} 0V${height}`;
    put(svg, "path", { class: "blocks", d });
  }
  if (outlier >= 0) put(svg, "rect", { class: "outlier", x: outlier % x.cols * side, y: Math.floor(outlier / x.cols) * side, width: side, height: side, rx: 2 });
  hover(svg, (px, py) => {
    const [i, j] = [Math.floor(py / side), Math.floor(px / side)];
    return i >= 0 && j >= 0 && i < x.rows && j < x.cols ? describe(i, j) : null;
  });
}
function showOperand() {
  const name = $("operand").value, where = operandOf[name], { q } = layer.found[layer.recipe][name];
  const x = turned(name), outlier = where === $("where").value ? outlierAt(name) : -1;
  const got = engine.dequantize(q), format = q.spec && formats[q.spec.format], rotated = q.spec?.transform?.kind === "hadamard";
  $("spec").textContent = q.spec ? `${layer.recipe}: ${q.spec.name}` : `${layer.recipe}: ${say("high precision", "高精度")}`;
  drawMatrix($("before"), x, {
    label: say(`${TITLES[name]} before the cast`, `转换之前的 ${TITLES[name]}`), grid: rotated ? null : q.grid, outlier,
    describe: (i, j) => [`${TITLES[name]}[${i}, ${j}] = ${human(x.data[i * x.cols + j])}`],
  });
  const lost = (i) => q.spec && q.cast.data[i] !== 0 && q.data[i] === 0 ? "lost" : q.spec && Math.abs(q.cast.data[i]) * q.scale[q.grid.of(Math.floor(i / q.cols), i % q.cols)] > format.max * (1 + 2 ** -20) ? "clip" : null;
  drawMatrix($("after"), got, {
    label: say(`${TITLES[name]} after the cast of ${layer.recipe}`, `${layer.recipe} 转换之后的 ${TITLES[name]}`), marks: lost, grid: q.grid, outlier: rotated ? -1 : outlier,
    describe: (i, j) => {
      const at = i * q.cols + j;
      if (!q.spec) return [`${human(got.data[at])}`];
      const block = q.grid.of(i, j), code = engine.encode(q.data[at], format);
      return [{ name: say("was", "原值"), value: human(q.cast.data[at]) }, { name: say("code", "编码"), value: `0x${code.toString(16).toUpperCase()} = ${q.data[at]}` },
        { name: say("scale⁻¹ of its block", "所在块的 scale⁻¹"), value: human(q.inv[block]) }, { name: say("is", "现值"), value: human(got.data[at]) }];
    },
  });
  const focus = $("before").firstChild;
  focus.setAttribute("tabindex", "0");
  focus.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || outlier < 0) return;
    event.preventDefault();
    moveOutlier(Math.floor(outlier / x.cols) + step[0], outlier % x.cols + step[1]);
    $("before").firstChild.focus();
  });
  $("because").textContent = because(name, q, outlier, lost);
}
function because(name, q, outlier, lost) {
  if (!q.spec) return say("This operand is not cast.", "这个操作数不做转换。");
  const gone = [], blocks = new Set();
  q.data.forEach((_, i) => { if (lost(i) === "lost") { gone.push(i); blocks.add(q.grid.of(Math.floor(i / q.cols), i % q.cols)); } });
  const whole = Object.keys(recipes).find((recipe) => { const { spec } = layer.found[recipe][name].q; return spec && spec.rows === null && spec.cols === null && spec.scaling === "current"; });
  const then = layer.found[whole][name].gone, { count } = q.grid, n = q.data.length, per = plain(Math.min(n, q.grid.high * q.grid.wide));
  const scales = count === 1 ? say("One scale serves all", "所有数共用一个缩放：共") + ` ${plain(n)}` + say(" numbers", " 个") : say(`${plain(count)} blocks of ${per} numbers have a scale each`, `${plain(count)} 块各有自己的缩放，每块 ${per} 个数`);
  if (count === 1 || outlier < 0 || !gone.length) return `${scales}${say(". ", "。")}${say(`${plain(gone.length)} became 0.`, `归零：${plain(gone.length)} 个。`)}`;
  return say(`${scales}. The outlier sets the scale of its own block only. ${plain(gone.length)} of ${plain(n)} numbers became 0, in ${plain(blocks.size)} of ${plain(count)} blocks; with one scale for all (${whole}) it would be ${plain(then)}.`,
    `${scales}。离群值只决定它所在块的缩放。${plain(n)} 个数中有 ${plain(gone.length)} 个归零，分布在 ${plain(count)} 块中的 ${plain(blocks.size)} 块；若全部共用一个缩放（${whole}），则为 ${plain(then)} 个。`);
}
function moveOutlier(i, j) {
  const name = $("operand").value, where = operandOf[name], m = plainLayer[where], [r, c] = name.endsWith("Row") ? [i, j] : [j, i];
  layer.at[where] = [clamp(r, 0, m.rows - 1), clamp(c, 0, m.cols - 1)];
  $("where").value = where;
  recompute();
}
function showLayer() {
  const v = Number($("octaves").value);
  $("octaves-now").textContent = power(v);
  $("octaves").setAttribute("aria-valuetext", `2^${v}`);
  options($("metric"), Object.entries(METRICS).map(([key, texts]) => [key, say(...texts)]));
  options($("operand"), OPERANDS.map((name) => [name, TITLES[name]]));
  showRecipes();
  showOperand();
}
const recompute = () => { computeLayer(); showLayer(); };
on("where", "change", () => { $("operand").value = `${$("where").value}Row`; recompute(); });
on("octaves", "input", recompute);
on("metric", "change", showLayer);
on("operand", "change", showLayer);
drag($("before"), (px, py) => {
  const name = $("operand").value, m = plainLayer[operandOf[name]], cols = name.endsWith("Row") ? m.cols : m.rows, side = $("before").firstChild.viewBox.baseVal.width / cols;
  moveOutlier(Math.floor(py / side), Math.floor(px / side));
});

// ---- a training, twice --------------------------------------------------------------------------------------------

const STEPS = 400, LOST = 1e6, SHOWN = 30, calm = matchMedia("(prefers-reduced-motion: reduce)");
const race = { sides: [], running: false };
const lr = () => 2 ** Number($("lr").value);
const PARTS = { all: ["all GEMMs", "全部 GEMM"], fprop: ["the forward only", "只有前向"], grad: ["the backward only", "只有反向"] };
// The cells of a recipe in the chosen GEMMs, high precision in the others.
function chosen(name) {
  const part = $("gemms").value, kept = (gemm) => part === "all" || (part === "fprop") === (gemm === "fprop");
  return Object.fromEntries(Object.entries(recipes[name]).map(([gemm, cells]) => [gemm, kept(gemm) ? cells : { lhs: null, rhs: null }]));
}
function newRace() {
  const settings = { lr: lr(), octaves: Number($("channel").value) };
  race.sides = ["recipe-a", "recipe-b"].map((id) => ({ name: $(id).value, training: new engine.Training({ recipe: chosen($(id).value), ...settings }), xs: [], loss: [], amax: [], underflow: [], over: null }));
}
function takeStep(side) {
  if (side.over !== null || side.xs.length >= STEPS) return;
  const { loss, layers } = side.training.step(), { xRow, wRow } = layers[1];
  side.xs.push(side.training.steps);
  side.loss.push(Number.isFinite(loss) ? loss : null);
  const x = xRow.spec ? xRow.cast : xRow;
  side.amax.push(x.data.reduce((top, v) => Math.max(top, Math.abs(v)), 0));
  let some = 0, lost = 0;
  if (xRow.spec) x.data.forEach((v, i) => { if (v !== 0) { some++; if (xRow.data[i] === 0) lost++; } });
  side.underflow.push(some ? 100 * lost / some : 0);
  if (!(loss < LOST)) side.over = side.training.steps;
}
const finished = () => race.sides.every((side) => side.over !== null || side.xs.length >= STEPS);
function frame() {
  if (!race.running) return;
  for (const until = performance.now() + (calm.matches ? 400 : 24); performance.now() < until && !finished();) race.sides.forEach(takeStep);
  if (finished()) race.running = false;
  showRace();
  if (race.running) requestAnimationFrame(frame);
}
function showRace() {
  for (const id of ["recipe-a", "recipe-b"]) options($(id), Object.keys(recipes).map((name) => [name, name]));
  options($("gemms"), Object.entries(PARTS).map(([key, texts]) => [key, say(...texts)]));
  $("lr-now").textContent = human(lr());
  $("channel-now").textContent = power(Number($("channel").value));
  $("go").textContent = race.running ? say("pause", "暂停") : say("run", "运行");
  const last = Math.max(20, ...race.sides.map((side) => side.xs.length)), curves = (key, most = Infinity) => race.sides.map((side, i) => ({ name: `${"AB"[i]} ${side.name}`, xs: side.xs, ys: side[key].map((v) => v <= most ? v : null), css: `s${i + 1}` }));
  lines($("loss"), { height: 250, label: say("Loss of both trainings", "两次训练的损失"), series: curves("loss", SHOWN), x: [1, last], log: true });
  lines($("amax"), { height: 180, label: say("Largest input of the middle layer", "中间层输入的最大值"), series: curves("amax"), x: [1, last], log: true });
  lines($("underflow"), { height: 180, label: say("Share of inputs that become 0", "输入归零的比例"), series: curves("underflow"), x: [1, last] });
  $("told").textContent = race.sides.map((side, i) => {
    const who = `${"AB"[i]} ${side.name}`, recent = side.loss.slice(-20).filter((v) => v !== null);
    if (side.over !== null) return say(`${who}: diverged at step ${side.over}.`, `${who}：第 ${side.over} 步发散。`);
    if (!recent.length) return "";
    const mean = human(recent.reduce((a, b) => a + b) / recent.length);
    return say(`${who}: loss ${mean} at step ${side.xs.length}.`, `${who}：第 ${side.xs.length} 步损失 ${mean}。`);
  }).join(" ");
}
function restart() {
  newRace();
  race.running = true;
  requestAnimationFrame(frame);
  showRace();
}
for (const id of ["recipe-a", "recipe-b"]) { options($(id), Object.keys(recipes).map((name) => [name, name])); on(id, "change", restart); }
[$("recipe-a").value, $("recipe-b").value] = ["mxfp8", "mxfp4"];
on("gemms", "change", restart);
for (const id of ["lr", "channel"]) { on(id, "input", showRace); on(id, "change", restart); }
on("again", "click", restart);
on("go", "click", () => {
  if (finished()) return restart();
  race.running = !race.running;
  requestAnimationFrame(frame);
  showRace();
});

// ---- your run -----------------------------------------------------------------------------------------------------

const MOST_BYTES = 256e6, run = { columns: null, error: "", name: "" };
// Columns {name: {xs, ys}} of a JSONL file. A torn last line is ignored.
function columnsOf(text) {
  const columns = {}, rows = text.split("\n").filter((line) => line.trim());
  let names = null, bad = 0;
  const numeric = (v) => typeof v === "number" || v === null || /^(nan|-?inf)$/.test(v);  // a run's words for no number
  const add = (name, step, v) => {
    const column = columns[name] ??= { xs: [], ys: [] };
    column.xs.push(step);
    column.ys.push(typeof v === "number" ? v : null);
  };
  rows.forEach((line, i) => {
    let row;
    try { row = JSON.parse(line); } catch { if (i < rows.length - 1) bad++; return; }
    if (row === null || typeof row !== "object") { bad++; return; }
    if (Array.isArray(row.tensors)) names = row.tensors.map((t) => `${t.layer}.${t.tensor}`);
    if (typeof row.step !== "number") return;
    if (names && Array.isArray(row.amax)) row.amax.forEach((v, k) => add(names[k] ?? String(k), row.step, v));
    else for (const [name, v] of Object.entries(row)) if (name !== "step" && numeric(v)) add(name, row.step, v);
  });
  return { columns, bad, rows: rows.length };
}
async function readFile(file) {
  Object.assign(run, { columns: null, error: null, name: file.name });
  if (file.size > MOST_BYTES) run.error = () => say(`${file.name} has ${human(file.size / 1e6, "MB")}; at most ${MOST_BYTES / 1e6} MB are read here. Use: ottava report RUN`, `${file.name} 有 ${human(file.size / 1e6, "MB")}；这里最多读取 ${MOST_BYTES / 1e6} MB。请用：ottava report RUN`);
  else {
    const { columns, bad, rows } = columnsOf(await file.text()), count = Object.keys(columns).length;
    run.columns = count ? columns : null;
    run.error = () => count ? say(`${file.name}: ${plain(rows)} lines, ${plain(count)} columns${bad ? `; ${plain(bad)} lines are no JSON objects and were left out` : ""}.`, `${file.name}：${plain(rows)} 行，${plain(count)} 列${bad ? `；${plain(bad)} 行不是 JSON 对象，已略过` : ""}。`)
      : say(`${file.name}: no line with a step and a number was found in ${plain(rows)} lines. Needed: metrics.jsonl, steps.jsonl or amax.jsonl of a run folder.`, `${file.name}：${plain(rows)} 行中没有带 step 和数值的行。需要运行目录中的 metrics.jsonl、steps.jsonl 或 amax.jsonl。`);
  }
  options($("column"), Object.keys(run.columns ?? {}).map((name) => [name, name]));
  if (run.columns?.loss) $("column").value = "loss";
  showRun();
}
function showRun() {
  $("read").textContent = run.error ? run.error() : "";
  $("charts").hidden = !run.columns;
  if (!run.columns) return;
  const name = $("column").value, column = run.columns[name], every = Math.ceil(column.xs.length / 4000), kept = (_, i) => i % every === 0;
  const [xs, ys] = [column.xs.filter(kept), column.ys.filter(kept)], range = xs.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  lines($("series"), { height: 260, label: name, series: [{ name, xs, ys, css: "s1" }], x: range, log: $("logarithmic").checked });
}
on("file", "change", () => { if ($("file").files[0]) readFile($("file").files[0]); });
for (const id of ["column", "logarithmic"]) on(id, "change", showRun);
for (const [event, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) on("drop", event, (e) => {
  e.preventDefault();
  $("drop").classList.toggle("over", over);
  if (event === "drop" && e.dataTransfer.files[0]) readFile(e.dataTransfer.files[0]);
});

// ---- language, width ----------------------------------------------------------------------------------------------

function showAll() { showNumber(); showLayer(); showRace(); showRun(); }
function speak(tongue) {
  document.documentElement.lang = tongue;
  for (const button of document.querySelectorAll("[data-tongue]")) button.setAttribute("aria-pressed", button.dataset.tongue === tongue);
  showAll();
}
for (const button of document.querySelectorAll("[data-tongue]")) button.addEventListener("click", () => {
  history.replaceState(null, "", `#lang=${button.dataset.tongue}`);
  speak(button.dataset.tongue);
});
let waiting = 0;
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(showAll); });
options($("gemms"), Object.keys(PARTS).map((key) => [key, key]));
computeLayer();
newRace();
const asked = /lang=(en|zh)/.exec(location.hash)?.[1] ?? navigator.language.slice(0, 2);
speak(asked === "zh" ? "zh-CN" : "en");
new IntersectionObserver(([seen], observer) => {  // it runs when somebody sees it
  if (!seen.isIntersecting) return;
  observer.disconnect();
  if (!race.sides[0].xs.length) restart();
}).observe($("loss"));
document.documentElement.dataset.drawn = "yes";
})();
