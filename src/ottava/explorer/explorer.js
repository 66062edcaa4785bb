// What the explorer shows. engine.js computes; chart.js and draw.js draw. The address keeps the language:
// explorer.html#lang=zh-CN.
(() => {
const tables = JSON.parse($("tables").textContent), engine = makeEngine(tables), { formats, recipes } = tables;

const zh = () => document.documentElement.lang.startsWith("zh"), say = (en, chinese) => zh() ? chinese : en;
const sup = (n) => String(n).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"["0123456789-".indexOf(c)]), power = (n) => `2${sup(n)}`;
const on = (id, event, act) => $(id).addEventListener(event, act);
const numberIn = (id) => Number($(id).value);
// The entries of a selector, [value, text]; what was chosen stays chosen.
function options(id, entries) {
  const select = $(id), chosen = select.value;
  select.replaceChildren();
  for (const [value, text] of entries) put(select, "option", { value }, text);
  if (entries.some(([value]) => value === chosen)) select.value = chosen;
}
const spoken = (texts) => Object.entries(texts).map(([key, pair]) => [key, say(...pair)]);
// A pointer that comes down on a picture and moves: act(x, y) in the units of its viewBox.
function drag(host, act) {
  let held = false;
  const move = (event) => {
    if (!held || !host.firstChild) return;
    const { x, y } = pointIn(host.firstChild, event);
    act(x, y);
  };
  host.addEventListener("pointerdown", (event) => {
    held = true;
    if (event.isTrusted) host.setPointerCapture(event.pointerId);  // the picture under the pointer is drawn anew
    move(event);
  });
  host.addEventListener("pointermove", move);
  for (const end of ["pointerup", "pointercancel"]) host.addEventListener(end, () => { held = false; });
}

// ---- one number ---------------------------------------------------------------------------------------------------

// The line shows 2**LOW to 2**HIGH. The number is multiplied by a scale before it is cast, and divided by it after.
const LOW = -24, HIGH = 20, ROW = 26, LEFT = 82, RIGHT = 10, number = { x: Math.fround(0.3) };
const scaled = () => Math.fround(number.x * 2 ** numberIn("factor"));
const landed = (format) => engine.round(Number.isFinite(scaled()) || !format.has_nan ? scaled() : NaN, format);
const exact = (v) => v === null ? "–" : String(Number(v.toPrecision(7)));
const hex = (code, bits) => "0x" + code.toString(16).toUpperCase().padStart(Math.ceil(bits / 4), "0");

function zoneOf(x, y, format) {
  if (x !== 0 && y === 0) return ["dead", say("becomes 0", "归零")];
  if (Math.abs(x) > format.max || x < format.lowest) return ["clip", say("clipped", "截断")];
  if (Math.abs(y) < format.min_normal && y !== 0) return ["sub", say("subnormal", "次正规数")];
  return ["normal", y === 0 ? say("zero", "零") : say("normal", "正规数")];
}
function drawLine() {
  const names = Object.keys(formats), foot = names.length * ROW;
  const label = say("A line for each format: where numbers vanish, lose digits, are kept or clipped",
    "每种格式一条线：数在哪里归零、丢失位数、保留或截断");
  const { svg, width } = canvas($("line"), foot + 22, label);
  const octave = (width - LEFT - RIGHT) / (HIGH - LOW), X = (t) => LEFT + (clamp(t, LOW, HIGH) - LOW) * octave;
  const at = (v) => X(v > 0 ? Math.log2(v) : LOW);
  names.forEach((name, row) => drawFormat(svg, name, row * ROW + 5, at, octave));
  const x = at(Math.abs(scaled())), step = width > 600 ? 4 : 11;
  put(svg, "line", { class: "hand", x1: x, x2: x, y1: 0, y2: foot });
  for (let t = LOW; t <= HIGH; t += step) {
    const anchor = t === LOW ? "start" : t === HIGH ? "end" : "middle";
    put(svg, "text", { x: X(t), y: foot + 18, "text-anchor": anchor }, power(t));
  }
  $("line").dataset.octave = octave;
}
// The zones of a format, its numbers where they are apart, and where the number lands.
function drawFormat(svg, name, y, at, octave) {
  const format = formats[name], dead = format.has_zero ? format.min_subnormal / 2 : 0, { min_normal, max } = format;
  put(svg, "text", { class: "name", x: 0, y: y + 12 }, name);
  const zones = [["dead", 0, dead], ["sub", dead, min_normal], ["normal", min_normal, max], ["clip", max, Infinity]];
  for (const [zone, from, to] of zones) {
    if (at(to) > at(from)) put(svg, "rect", { class: `zone ${zone}`, x: at(from), width: at(to) - at(from), y, height: 16 });
  }
  if (format.bits <= 8 && octave / 2 ** format.mantissa_bits > 2) {
    const values = Array.from({ length: 2 ** (format.bits - Number(format.signed)) }, (_, code) => engine.decode(code, format));
    const shown = values.filter((v) => v >= 2 ** LOW && v <= 2 ** HIGH);
    put(svg, "path", { class: "codes", d: shown.map((v) => `M${at(v).toFixed(1)} ${y + 4}v8`).join("") });
  }
  const v = Math.abs(landed(format));
  put(svg, "circle", { class: v ? "lands" : "gone", cx: at(v), cy: y + 8, r: 4.5 });
}
// The numbers of the format just below and above y; null where there is none.
function neighbours(y, format) {
  if (y !== y) return [null, null];
  const count = 2 ** (format.bits - Number(format.signed)), code = engine.encode(y, format), size = code % count;
  const sign = code >= count ? -1 : 1;
  const valueOf = (n) => {
    const v = n >= 0 && n < count ? sign * engine.decode(n, format) : NaN;
    return Number.isFinite(v) ? v : null;
  };
  if (size === 0 && format.signed) return [-format.min_subnormal, format.min_subnormal];
  return sign > 0 ? [valueOf(size - 1), valueOf(size + 1)] : [valueOf(size + 1), valueOf(size - 1)];
}
// Sign, exponent and mantissa of a code, each in its colour.
function putBits(parent, code, format) {
  const text = code.toString(2).padStart(format.bits, "0"), cell = put(parent, "code", { class: "bits" });
  const sign = Number(format.signed), fields = [["s", 0, sign], ["e", sign, sign + format.exponent_bits], ["m", sign + format.exponent_bits]];
  for (const [css, from, to] of fields) {
    const part = text.slice(from, to);
    if (part) put(cell, "b", { class: css }, part.length > 10 ? part.slice(0, 8) + "…" : part);
  }
}
function showNumber() {
  const x = scaled(), exponent = numberIn("factor"), back = (v) => v === null ? null : v * 2 ** -exponent;
  $("factor-now").textContent = power(exponent);
  if (document.activeElement !== $("octave")) $("octave").value = Math.log2(Math.abs(number.x) || 2 ** LOW);
  $("octave").setAttribute("aria-valuetext", exact(number.x));
  if (document.activeElement !== $("exact")) $("exact").value = exact(number.x);
  drawLine();
  fill($("codes"), [say("format", "格式"), say("value", "数值"), say("error", "误差"), "", say("code", "编码"), say("bits", "位"),
    say("below", "下邻"), say("above", "上邻")], []);
  for (const [name, format] of Object.entries(formats)) {
    const row = put($("codes").tBodies[0], "tr"), y = landed(format), code = engine.encode(y, format);
    const [zone, told] = zoneOf(x, y, format);
    put(row, "th", { scope: "row" }, name);
    put(row, "td", {}, exact(back(y)));
    put(row, "td", {}, x === 0 ? "–" : human(100 * Math.abs(y - x) / Math.abs(x), "%"));
    put(row, "td", { class: `zone-name ${zone}` }, told);
    put(put(row, "td"), "code", {}, hex(code, format.bits));
    putBits(put(row, "td"), code, format);
    for (const v of neighbours(y, format)) put(row, "td", {}, exact(back(v)));
  }
  const kept = ["E4M3", "E5M2", "E2M1"].map((name) => `${name} ${exact(back(landed(formats[name])))}`).join(", ");
  $("number-now").textContent = `x = ${exact(number.x)}${exponent ? ` · ${say("scaled", "缩放后")} ${exact(x)}` : ""}: ${kept}`;
}
function setOctave(t) {
  number.x = Math.fround((number.x < 0 ? -1 : 1) * 2 ** clamp(Math.round(t * 64) / 64, LOW, HIGH));
  showNumber();
}
on("octave", "input", () => setOctave(numberIn("octave")));
on("exact", "input", () => {
  if ($("exact").value === "") return;
  number.x = Math.fround(numberIn("exact"));
  showNumber();
});
on("factor", "input", showNumber);
drag($("line"), (x) => setOctave(LOW + (x - LEFT) / Number($("line").dataset.octave)));

// ---- a layer and its outlier --------------------------------------------------------------------------------------

const OPERANDS = { xRow: "x", xCol: "xᵀ", wRow: "w", wCol: "wᵀ", dyRow: "dy", dyCol: "dyᵀ" }, RESULTS = { y: "y", dx: "dx", dw: "dw" };
const COLUMNS = { ...RESULTS, ...OPERANDS };
const TENSOR = { xRow: "x", xCol: "x", wRow: "w", wCol: "w", dyRow: "dy", dyCol: "dy" };
const DOORS = { input: "x", weight: "w", grad_output: "dy" };  // a recipe's words
const SIZE = { x: 1, w: 2 ** -3, dy: 2 ** -10 };
const normal = (word, rows, cols, size) =>
  engine.toBF16(engine.matrix(rows, cols, engine.normals([7, word], rows * cols).map((v) => v * size)));
const calmTensors = { x: normal(1, 32, 64, SIZE.x), w: normal(2, 32, 64, SIZE.w), dy: normal(3, 32, 32, SIZE.dy) };
const layer = { recipe: "mxfp8", at: { x: [12, 21], w: [12, 21], dy: [12, 21] }, tensors: calmTensors, found: {} };

const METRICS = {
  others: ["SQNR of the others, dB", "其余数的 SQNR，dB"], sqnr: ["SQNR of all, dB", "全部的 SQNR，dB"],
  cosine: ["cosine", "余弦"], underflow: ["became 0, %", "归零，%"], clipped: ["clipped, %", "截断，%"],
};
const NOTES = {
  others: ["All numbers but the outlier, and all results that it does not enter. A rotated operand is rotated back first.",
    "除离群值以外的数，以及它没有参与的结果。经旋转的操作数先旋转回来再测量。"],
  sqnr: ["The outlier dominates this ratio: it may look well while all others are lost.",
    "这个比值由离群值主导：其余的数全部丢失时，它仍可能很好看。"],
  cosine: ["The cosine, too, is mostly that of the outlier.", "余弦也主要由离群值决定。"],
  underflow: ["Numbers that were not 0 and whose code is. Results of GEMMs are not cast.",
    "原本不为 0 而编码为 0 的数。GEMM 的结果不做转换。"],
  clipped: ["Numbers beyond the largest one of the format under their scale.", "按其缩放超出格式最大值的数。"],
};
const LEVELS = { others: [24, 14, 8], sqnr: [24, 14, 8], cosine: [0.9995, 0.995, 0.98], underflow: [1, 5, 20], clipped: [0.001, 1, 5] };

// a b.T in FP64, which no format has touched.
function truth(a, b) {
  const y = new Float64Array(a.rows * b.rows);
  for (let i = 0; i < a.rows; i++) {
    for (let j = 0; j < b.rows; j++) {
      for (let k = 0; k < a.cols; k++) y[i * b.rows + j] += a.data[i * a.cols + k] * b.data[j * b.cols + k];
    }
  }
  return y;
}
function errors(wanted, got, skipped = () => false) {
  let signal = 0, noise = 0, dot = 0, size = 0;
  wanted.forEach((v, i) => {
    if (skipped(i)) return;
    signal += v * v;
    noise += (v - got[i]) ** 2;
    dot += v * got[i];
    size += got[i] * got[i];
  });
  return { sqnr: 10 * Math.log10(signal / noise), cosine: dot / Math.sqrt(signal * size) };
}
const before = (name) => name.endsWith("Row") ? layer.tensors[TENSOR[name]] : engine.transpose(layer.tensors[TENSOR[name]]);
// The outlier's place in an operand, -1 if it is in another tensor.
function outlierIn(name) {
  const [i, j] = layer.at[TENSOR[name]], { rows, cols } = calmTensors[TENSOR[name]];
  if ($("where").value !== TENSOR[name]) return -1;
  return name.endsWith("Row") ? i * cols + j : j * rows + i;
}
// Whether the outlier of a tensor at (i, j) enters a result at (row, column).
const ENTERS = {
  y: { x: ([i], row) => row === i, w: ([i], row, column) => column === i },
  dx: { dy: ([i], row) => row === i, w: ([, j], row, column) => column === j },
  dw: { dy: ([, j], row) => row === j, x: ([, j], row, column) => column === j },
};
const blockAt = (q, at) => q.grid.of(Math.floor(at / q.cols), at % q.cols);
// "lost": not 0, and its code is; "clip": beyond the format by more than a rounding.
function fateOf(q, at) {
  if (!q.spec) return null;
  if (q.cast.data[at] !== 0 && q.data[at] === 0) return "lost";
  return Math.abs(q.cast.data[at]) * q.scale[blockAt(q, at)] > formats[q.spec.format].max * (1 + 2 ** -20) ? "clip" : null;
}
function measureOperand(q, name) {
  if (!q.spec) return { q, lost: [], others: Infinity, sqnr: Infinity, cosine: 1, underflow: 0, clipped: 0 };
  const x = before(name), got = engine.recovered(q, x).data, own = outlierIn(name), lost = [];
  let clipped = 0;
  q.data.forEach((_, at) => {
    const fate = fateOf(q, at);
    if (fate === "lost") lost.push(at);
    if (fate === "clip") clipped++;
  });
  const share = (count) => 100 * count / q.data.length;
  const others = errors(x.data, got, (at) => at === own).sqnr;
  return { q, lost, ...errors(x.data, got), others, underflow: share(lost.length), clipped: share(clipped) };
}
function measureResult(y, wanted, name) {
  const where = $("where").value, enters = ENTERS[name][where] ?? (() => false);
  const touched = (at) => enters(layer.at[where], Math.floor(at / y.cols), at % y.cols);
  return { ...errors(wanted, y.data), others: errors(wanted, y.data, touched).sqnr };
}
// A predicted scale is that of the tensors before the outlier came.
function predictedScales(recipe) {
  const cells = { input: recipe.fprop.lhs, weight: recipe.fprop.rhs, grad_output: recipe.dgrad.lhs };
  const largest = (x) => x.data.reduce((top, v) => Math.max(top, Math.abs(v)), 0);
  return Object.fromEntries(Object.entries(cells).map(([door, spec]) =>
    [door, spec && spec.scaling !== "current" ? engine.fromWindow([largest(calmTensors[DOORS[door]])], spec) : null]));
}
function computeLayer() {
  const where = $("where").value, calm = calmTensors[where], place = layer.at[where][0] * calm.cols + layer.at[where][1];
  const big = (v) => Math.sign(v || 1) * SIZE[where] * 2 ** numberIn("octaves");
  layer.tensors = { ...calmTensors, [where]: engine.mapped(calm, (v, at) => at === place ? big(v) : v) };
  const { x, w, dy } = layer.tensors, t = engine.transpose;
  const wanted = { y: truth(x, w), dx: truth(dy, t(w)), dw: truth(t(dy), t(x)) };
  for (const [name, recipe] of Object.entries(recipes)) {
    let drawn = 0;
    const all = engine.linear(x, w, dy, recipe, () => [drawn++, 4], predictedScales(recipe));
    const operands = Object.keys(OPERANDS).map((one) => [one, measureOperand(all[one], one)]);
    const results = Object.keys(RESULTS).map((one) => [one, measureResult(all[one], wanted[one], one)]);
    layer.found[name] = Object.fromEntries([...operands, ...results]);
  }
}
// The class of a cell: none where all is well, l1 to l3.
function levelOf(metric, v) {
  if (v === undefined) return "";
  const fewer = metric === "underflow" || metric === "clipped";
  const found = LEVELS[metric].findIndex((limit) => fewer ? v < limit : v >= limit);
  return found === 0 ? "" : `l${found < 0 ? 3 : found}`;
}
function showRecipes() {
  const metric = $("metric").value, table = $("recipes");
  const told = (v) => v === undefined ? "–" : v === Infinity ? say("exact", "精确")
    : metric === "cosine" ? v.toFixed(4) : (Math.round(10 * v) / 10 + 0).toFixed(1);
  fill(table, [say("recipe", "配方"), ...Object.values(COLUMNS)], []);
  for (const [name, found] of Object.entries(layer.found)) {
    const chosen = name === layer.recipe, row = put(table.tBodies[0], "tr", { "aria-selected": chosen });
    const button = put(put(row, "th", { scope: "row" }), "button", { type: "button", "aria-pressed": chosen }, name);
    button.addEventListener("click", () => {
      layer.recipe = name;
      showLayer();
      table.querySelector("[aria-pressed=true]").focus();
    });
    for (const one of Object.keys(COLUMNS)) {
      const v = found[one][metric];
      put(row, "td", { class: levelOf(metric, v) + (one === "xRow" ? " first" : "") }, told(v));
    }
  }
  $("metric-note").textContent = say(...NOTES[metric]);
}
// A matrix as squares: shades of magnitude around the median, what was lost, the blocks, and the outlier. All squares
// of a class are one path.
function drawMatrix(host, x, { label, fate = () => null, grid = null, outlier, describe }) {
  const { svg, width } = canvas(host, 10, label), side = width / x.cols, paths = {};
  svg.setAttribute("viewBox", `0 0 ${width} ${side * x.rows}`);
  const sizes = Array.from(x.data, Math.abs).filter((v) => v > 0).sort((a, b) => a - b), middle = sizes[sizes.length >> 1] || 1;
  const shade = (v) => v === 0 ? 0 : clamp(Math.round(Math.log2(Math.abs(v) / middle)) + 4, 1, 8), s = side.toFixed(2);
  x.data.forEach((v, at) => {
    const css = fate(at) ?? `n${shade(v)}`, left = (at % x.cols * side).toFixed(2), top = (Math.floor(at / x.cols) * side).toFixed(2);
    paths[css] = `${paths[css] ?? ""}M${left} ${top}h${s}v${s}h-${s}z`;
  });
  for (const [css, d] of Object.entries(paths)) put(svg, "path", { class: `cell ${css}`, d, "shape-rendering": "crispEdges" });
  let d = "";
  for (let i = 1; i < (grid?.down ?? 0); i++) d += `M0 ${i * grid.high * side}H${width}`;
  for (let j = 1; j < (grid?.across ?? 0); j++) d += `M${j * grid.wide * side} 0V${side * x.rows}`;
  if (d) put(svg, "path", { class: "blocks", d });
  const place = { x: outlier % x.cols * side, y: Math.floor(outlier / x.cols) * side, width: side, height: side, rx: 2 };
  if (outlier >= 0) put(svg, "rect", { class: "outlier", ...place });
  hover(svg, (px, py) => {
    const [i, j] = [Math.floor(py / side), Math.floor(px / side)];
    return i >= 0 && j >= 0 && i < x.rows && j < x.cols ? describe(i, j) : null;
  });
  return svg;
}
function showOperand() {
  const name = $("operand").value, title = OPERANDS[name], x = before(name), { q } = layer.found[layer.recipe][name];
  const outlier = outlierIn(name), rotated = q.spec?.transform?.kind === "hadamard", after = engine.dequantize(q);
  $("spec").textContent = `${layer.recipe}: ${q.spec ? q.spec.name : say("high precision", "高精度")}`;
  const picture = drawMatrix($("before"), x, {
    label: say(`${title} before the cast`, `转换之前的 ${title}`), grid: rotated ? null : q.grid, outlier,
    describe: (i, j) => [`${title}[${i}, ${j}] = ${human(x.data[i * x.cols + j])}`],
  });
  drawMatrix($("after"), after, {
    label: say(`${title} after the cast of ${layer.recipe}`, `${layer.recipe} 转换之后的 ${title}`),
    fate: (at) => fateOf(q, at), grid: q.grid, outlier: rotated ? -1 : outlier, describe: (i, j) => described(q, after, i, j),
  });
  picture.setAttribute("tabindex", "0");
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || outlier < 0) return;
    event.preventDefault();
    moveOutlier(Math.floor(outlier / x.cols) + step[0], outlier % x.cols + step[1]);
    $("before").firstChild.focus();
  });
  $("because").textContent = because(name);
}
function described(q, after, i, j) {
  const at = i * q.cols + j;
  if (!q.spec) return [human(after.data[at])];
  const format = formats[q.spec.format], code = hex(engine.encode(q.data[at], format), format.bits);
  return [
    { name: say("was", "原值"), value: human(q.cast.data[at]) }, { name: say("code", "编码"), value: `${code} = ${q.data[at]}` },
    { name: say("scale⁻¹ of its block", "所在块的 scale⁻¹"), value: human(q.inv[blockAt(q, at)]) },
    { name: say("is", "现值"), value: human(after.data[at]) },
  ];
}
// The lesson of a cast in words, beside a recipe with one scale for the whole tensor.
function because(name) {
  const { q, lost } = layer.found[layer.recipe][name];
  if (!q.spec) return say("This operand is not cast.", "这个操作数不做转换。");
  const { grid } = q, n = plain(q.data.length), per = plain(Math.min(q.data.length, grid.high * grid.wide)), gone = plain(lost.length);
  const zero = say(`${gone} of ${n} numbers became 0`, `${n} 个数中有 ${gone} 个归零`);
  if (grid.count === 1) return say(`One scale serves all. ${zero}.`, `所有数共用一个缩放。${zero}。`);
  const scales = say(`${plain(grid.count)} blocks of ${per} numbers have a scale each.`,
    `${plain(grid.count)} 块各有自己的缩放，每块 ${per} 个数。`);
  if (outlierIn(name) < 0 || !lost.length) return say(`${scales} ${zero}.`, `${scales}${zero}。`);
  const blocks = plain(new Set(lost.map((at) => blockAt(q, at))).size);
  const [whole, then] = Object.entries(layer.found).map(([recipe, found]) => [recipe, found[name]])
    .find(([, { q: { spec } }]) => spec && spec.rows === null && spec.cols === null && spec.scaling === "current");
  return say(
    `${scales} The outlier sets the scale of its own block only. ${zero}, in ${blocks} of ${plain(grid.count)} blocks; `
      + `with one scale for all (${whole}) it would be ${plain(then.lost.length)}.`,
    `${scales}离群值只决定它所在块的缩放。${zero}，分布在 ${plain(grid.count)} 块中的 ${blocks} 块；`
      + `若全部共用一个缩放（${whole}），则为 ${plain(then.lost.length)} 个。`);
}
// To row i and column j of the operand that is shown; its tensor gets the outlier.
function moveOutlier(i, j) {
  const name = $("operand").value, { rows, cols } = calmTensors[TENSOR[name]], [row, column] = name.endsWith("Row") ? [i, j] : [j, i];
  layer.at[TENSOR[name]] = [clamp(row, 0, rows - 1), clamp(column, 0, cols - 1)];
  $("where").value = TENSOR[name];
  recompute();
}
function showLayer() {
  $("octaves-now").textContent = power(numberIn("octaves"));
  $("octaves").setAttribute("aria-valuetext", power(numberIn("octaves")));
  options("metric", spoken(METRICS));
  options("operand", Object.entries(OPERANDS));
  showRecipes();
  showOperand();
}
function recompute() {
  computeLayer();
  showLayer();
}
on("where", "change", () => {
  $("operand").value = `${$("where").value}Row`;
  recompute();
});
on("octaves", "input", recompute);
for (const id of ["metric", "operand"]) on(id, "change", showLayer);
drag($("before"), (px, py) => {
  const side = $("before").firstChild.viewBox.baseVal.width / before($("operand").value).cols;
  moveOutlier(Math.floor(py / side), Math.floor(px / side));
});

// ---- a training, twice --------------------------------------------------------------------------------------------

// A loss above SHOWN is not drawn, and one above LOST ends its side.
const STEPS = 400, SHOWN = 30, LOST = 1e6, SIDES = ["recipe-a", "recipe-b"], race = { sides: [], running: false };
const still = matchMedia("(prefers-reduced-motion: reduce)");
const PARTS = {
  all: ["all GEMMs", "全部 GEMM"], fprop: ["the forward only", "只有前向"], grad: ["the backward only", "只有反向"],
};
// The cells of a recipe in the chosen GEMMs, and high precision in the others.
function chosenCells(name) {
  const part = $("gemms").value, high = { lhs: null, rhs: null };
  const kept = (gemm) => part === "all" || (part === "fprop") === (gemm === "fprop");
  return Object.fromEntries(Object.entries(recipes[name]).map(([gemm, cells]) => [gemm, kept(gemm) ? cells : high]));
}
function newRace() {
  const settings = { lr: 2 ** numberIn("lr"), octaves: numberIn("channel") };
  race.sides = SIDES.map((id, i) => {
    const name = $(id).value, training = new engine.Training({ recipe: chosenCells(name), ...settings });
    return { name: `${"AB"[i]} ${name}`, css: `s${i + 1}`, training, xs: [], loss: [], amax: [], underflow: [], diverged: null };
  });
}
const ended = (side) => side.diverged !== null || side.xs.length >= STEPS;
function takeStep(side) {
  if (ended(side)) return;
  const { loss, layers } = side.training.step(), { xRow } = layers[1], x = xRow.spec ? xRow.cast : xRow;
  side.xs.push(side.training.steps);
  side.loss.push(Number.isFinite(loss) ? loss : null);
  side.amax.push(x.data.reduce((top, v) => Math.max(top, Math.abs(v)), 0));
  let nonzero = 0, lost = 0;
  x.data.forEach((v, at) => {
    if (v !== 0) nonzero++;
    if (fateOf(xRow, at) === "lost") lost++;
  });
  side.underflow.push(nonzero ? 100 * lost / nonzero : 0);
  if (!(loss < LOST)) side.diverged = side.training.steps;
}
// As many steps as fit into a frame; few pictures where less motion is asked for.
function frame() {
  if (!race.running) return;
  const until = performance.now() + (still.matches ? 400 : 24);
  while (performance.now() < until && !race.sides.every(ended)) race.sides.forEach(takeStep);
  race.running = !race.sides.every(ended);
  showRace();
  if (race.running) requestAnimationFrame(frame);
}
function said(side) {
  const { name, diverged } = side, recent = side.loss.slice(-20).filter((v) => v !== null);
  if (diverged !== null) return say(`${name}: diverged at step ${diverged}.`, `${name}：第 ${diverged} 步发散。`);
  if (!recent.length) return "";
  const mean = human(recent.reduce((a, b) => a + b) / recent.length);
  return say(`${name}: loss ${mean} at step ${side.xs.length}.`, `${name}：第 ${side.xs.length} 步损失 ${mean}。`);
}
function showRace() {
  options("gemms", spoken(PARTS));
  $("lr-now").textContent = human(2 ** numberIn("lr"));
  $("channel-now").textContent = power(numberIn("channel"));
  $("go").textContent = race.running ? say("pause", "暂停") : say("run", "运行");
  const last = Math.max(20, ...race.sides.map(({ xs }) => xs.length)), x = [1, last];
  const curves = (key, most = Infinity) => race.sides.map(({ name, css, xs, [key]: ys }) =>
    ({ name, css, xs, ys: ys.map((v) => v <= most ? v : null) }));
  const labels = [say("Loss of both trainings", "两次训练的损失"), say("Largest input of the middle layer", "中间层输入的最大值"),
    say("Share of inputs that become 0", "输入归零的比例")];
  lines($("loss"), { height: 250, label: labels[0], series: curves("loss", SHOWN), x, log: true });
  lines($("amax"), { height: 180, label: labels[1], series: curves("amax"), x, log: true });
  lines($("underflow"), { height: 180, label: labels[2], series: curves("underflow"), x });
  const every = Math.round(last / 20), rows = Array.from({ length: Math.ceil(last / every) }, (_, i) => i * every);
  fill($("steps"), [say("step", "步"), ...race.sides.map(({ name }) => name)],
    rows.map((i) => [plain(i + 1), ...race.sides.map(({ loss }) => human(loss[i]))]));
  $("told").setAttribute("aria-live", race.running ? "off" : "polite");  // the end is told, not each step
  $("told").textContent = race.sides.map(said).join(" ");
}
function run() {
  race.running = true;
  requestAnimationFrame(frame);
  showRace();
}
function restart() {
  newRace();
  if (!race.running) run();
}
for (const id of [...SIDES, "gemms"]) on(id, "change", restart);
for (const id of ["lr", "channel"]) { on(id, "input", showRace); on(id, "change", restart); }
on("again", "click", restart);
on("go", "click", () => {
  if (race.sides.every(ended)) return restart();
  if (!race.running) return run();
  race.running = false;
  showRace();
});

// ---- your run -----------------------------------------------------------------------------------------------------

const KNOWN = ["metrics.jsonl", "steps.jsonl", "amax.jsonl"], MOST_BYTES = 256e6, MOST_POINTS = 4000, dropped = { columns: null, told: () => "" };
// Columns {name: {xs, ys}} of a JSONL file of a run, null for a number that is none. A torn last line is ignored.
function columnsOf(text) {
  const columns = Object.create(null), rows = text.split("\n").filter((line) => line.trim());
  const numeric = (v) => typeof v === "number" || v === null || /^(nan|-?inf)$/.test(v);
  const add = (name, step, v) => {
    const column = columns[name] ??= { xs: [], ys: [] };
    column.xs.push(step);
    column.ys.push(typeof v === "number" ? v : null);
  };
  let tensors = null, bad = 0;
  rows.forEach((line, i) => {
    let row = null;
    try { row = JSON.parse(line); } catch { if (i === rows.length - 1) return; }
    if (row === null || typeof row !== "object") { bad++; return; }
    if (Array.isArray(row.tensors)) tensors = row.tensors.map((one) => `${one?.layer}.${one?.tensor}`);
    if (typeof row.step !== "number") return;
    const amaxes = tensors && Array.isArray(row.amax) ? row.amax.map((v, k) => [tensors[k] ?? String(k), v]) : Object.entries(row);
    for (const [name, v] of amaxes) if (name !== "step" && numeric(v)) add(name, row.step, v);
  });
  return { columns, bad, lines: rows.length };
}
// One file, or those of a folder that are of a run: their columns together, those of the first that has a name.
async function readFiles(files, folder) {
  const known = files.filter((file) => !folder || KNOWN.includes(file.name)).sort((a, b) => KNOWN.indexOf(a.name) - KNOWN.indexOf(b.name));
  const name = folder ? `${folder}/` : files[0].name, bytes = known.reduce((sum, file) => sum + file.size, 0);
  const size = human(bytes / 1e6, "MB"), most = human(MOST_BYTES / 1e6, "MB");
  if (bytes > MOST_BYTES) {
    Object.assign(dropped, { columns: null, told: () => say(`${name} has ${size}; at most ${most} are read here. Use: ottava report RUN`,
      `${name} 有 ${size}；这里最多读取 ${most}。请用：ottava report RUN`) });
    return showRun();
  }
  const read = await Promise.all(known.map(async (file) => columnsOf(await file.text()))), columns = Object.create(null);
  for (const one of read) for (const [key, column] of Object.entries(one.columns)) columns[key] ??= column;
  const sum = (key) => read.reduce((total, one) => total + one[key], 0), bad = sum("bad"), count = sum("lines"), names = Object.keys(columns);
  const of = folder && known.length ? ` ${known.map((file) => file.name).join(", ")}` : "";
  const left = () => bad ? say(`; left out, because they are no JSON objects: ${plain(bad)}`,
    `；不是 JSON 对象而略过：${plain(bad)}`) : "";
  dropped.columns = names.length ? columns : null;
  dropped.told = () => names.length
    ? say(`${name}${of}: lines ${plain(count)}, columns ${plain(names.length)}${left()}.`,
      `${name}${of}：行 ${plain(count)}，列 ${plain(names.length)}${left()}。`)
    : say(`${name}: no line with a step and a number was found in ${plain(count)} lines. `
      + "Needed: metrics.jsonl, steps.jsonl or amax.jsonl of a run folder.",
    `${name}：${plain(count)} 行中没有带 step 和数值的行。需要运行目录中的 metrics.jsonl、steps.jsonl 或 amax.jsonl。`);
  options("column", names.map((one) => [one, one]));
  if (names.includes("loss")) $("column").value = "loss";
  showRun();
}
function showRun() {
  $("read").textContent = dropped.told();
  $("charts").hidden = !dropped.columns;
  if (!dropped.columns) return;
  const name = $("column").value, column = dropped.columns[name], every = Math.ceil(column.xs.length / MOST_POINTS);
  const [xs, ys] = [column.xs, column.ys].map((all) => all.filter((_, i) => i % every === 0));
  const range = xs.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
  lines($("series"), { height: 260, label: name, series: [{ name, xs, ys, css: "s1" }], x: range, log: $("logarithmic").checked });
}
// The files of a dropped folder; of a run those that count lie at its top. A browser lists a hundred at a time.
async function filesIn(entry) {
  const reader = entry.createReader(), found = [];
  for (let more; (more = await new Promise((done, lost) => reader.readEntries(done, lost))).length;) found.push(...more);
  return Promise.all(found.filter((one) => one.isFile && KNOWN.includes(one.name)).map((one) => new Promise((done, lost) => one.file(done, lost))));
}
async function readDropped({ items, files }) {
  const entry = items[0]?.webkitGetAsEntry?.();  // before the first wait: then the list is empty
  if (entry?.isDirectory) readFiles(await filesIn(entry), entry.name);
  else if (files[0]) readFiles([...files]);
}
on("file", "change", () => { if ($("file").files[0]) readFiles([...$("file").files]); });
on("folder", "change", () => {
  const files = [...$("folder").files].map((file) => [file, file.webkitRelativePath.split("/")]);
  if (files.length) readFiles(files.filter(([, path]) => path.length === 2).map(([file]) => file), files[0][1][0]);
});
for (const id of ["column", "logarithmic"]) on(id, "change", showRun);
for (const kind of ["dragover", "dragleave", "drop"]) on("drop", kind, (event) => {
  event.preventDefault();
  $("drop").classList.toggle("over", kind === "dragover");
  if (kind === "drop") readDropped(event.dataTransfer);
});

// ---- language, width ----------------------------------------------------------------------------------------------

function showAll() {
  for (const show of [showNumber, showLayer, showRace, showRun]) show();
}
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
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(showAll);
});
for (const id of SIDES) options(id, Object.keys(recipes).map((name) => [name, name]));
[$("recipe-a").value, $("recipe-b").value] = ["mxfp8", "mxfp4"];
options("gemms", spoken(PARTS));
computeLayer();
newRace();
speak((/lang=(en|zh)/.exec(location.hash)?.[1] ?? navigator.language).startsWith("zh") ? "zh-CN" : "en");
new IntersectionObserver(([place], observer) => {  // the training runs when somebody sees it
  if (!place.isIntersecting) return;
  observer.disconnect();
  if (!race.sides[0].xs.length) restart();
}).observe($("loss"));
document.documentElement.dataset.drawn = "yes";
})();
