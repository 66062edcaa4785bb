"use strict";
// Drawing code of all pages: elements, numbers and tooltips. Colours come from the CSS of the page, so light, dark and
// print need no code.

const $ = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const plain = (step) => step.toLocaleString("en");

// A number with three digits and its unit, in the format of base/text.py.
function human(x, unit = "") {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const tail = ["", "of x", "of x squared", "elements"].includes(unit) ? "" : ` ${unit}`;
  const sign = x < 0 ? "−" : "", size = Math.abs(x);
  if (size === Infinity) return sign + "∞" + tail;
  if (unit === "elements") return sign + plain(Math.round(size));
  const r = Number(size.toPrecision(3));
  if (r === 0) return sign + "0" + tail;
  if (r < 1e-3 || r >= 1e6) return sign + r.toExponential(2).replace("+", "").replace("e-", "e−") + tail;
  const places = Math.max(0, 2 - Math.floor(Math.log10(r)));
  return sign + r.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places }) + tail;
}

// A text in the language of the page; #words has pairs of an English template, with {} for what varies, and ours.
const templates = JSON.parse($("words")?.textContent ?? "[]").map(([english, other]) => [
  new RegExp(`^${english.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replaceAll("{}", "(.+?)")}$`), other,
]);
function said(text) {
  if (!templates.length || !/[a-z]{2}/i.test(text)) return text;
  for (const [pattern, other] of templates) {
    const found = pattern.exec(text);
    if (found) return other.replace(/\{(\d+)\}/g, (_, i) => said(found[Number(i) + 1]));
  }
  return text;
}
// Adds an element to a parent: SVG inside SVG, HTML elsewhere.
function put(parent, tag, attributes = {}, text = null) {
  const svg = tag === "svg" || parent.namespaceURI.endsWith("svg");
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = said(String(text));
  parent.append(node);
  return node;
}
// The position of an event in the units of a picture's viewBox.
const pointIn = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

// Calls answer(x, y) when the pointer moves, and shows the returned lines: texts, or {name, color, value}.
function hover(svg, answer) {
  const tip = $("tip");
  svg.addEventListener("pointermove", (event) => {
    const { x, y } = pointIn(svg, event), lines = answer(x, y);
    tip.style.display = lines ? "block" : "none";
    if (!lines) return;
    tip.replaceChildren();
    for (const line of lines) {
      const row = put(tip, "div", {}, line.name ?? line);
      if (line.color) row.prepend(put(row, "span", { class: "swatch", style: `--dot: ${line.color}` }));
      if (line.value) put(row, "span", { class: "value" }, line.value);
    }
    tip.style.left = clamp(event.clientX + 16, 8, Math.max(8, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
// A vertical line of a picture with an axis, such as "step", from low to high. All pictures of the page with this axis
// show theirs where `pointAt` says, whichever of them the pointer is on.
function crossed(svg, axis, box) {
  const cross = put(svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  svg.pointed = (one, x) => {
    const { left, right, low, high } = box;
    const seen = one === axis && x !== null && x >= low && x <= high;
    const at = seen ? left + (high > low ? (x - low) / (high - low) : 0.5) * (right - left) : left;
    for (const end of ["x1", "x2"]) cross.setAttribute(end, at);
    cross.setAttribute("visibility", seen ? "visible" : "hidden");
  };
  svg.addEventListener("pointerleave", () => pointAt(axis, null));
}
function pointAt(axis, x) {
  for (const svg of document.querySelectorAll("svg")) svg.pointed?.(axis, x);
}
// A tooltip for curves: the lines of describe(x) for the nearest of xs in the box, whose low and high may change.
function follow(svg, axis, box, xs, describe) {
  crossed(svg, axis, box);
  hover(svg, (px) => {
    const { left, right, low, high } = box, seen = xs.filter((x) => x >= low && x <= high);
    if (!seen.length) return null;
    const x = low + (px - left) / (right - left) * (high - low);
    const near = seen.reduce((best, v) => Math.abs(v - x) < Math.abs(best - x) ? v : best);
    pointAt(axis, near);
    return describe(near);
  });
}
// Dragging over a picture calls done([from, to]) with shares of its box's width.
function brushed(svg, { left, right, top, bottom }, done) {
  let from = null, box = null;
  const range = (event) => [from, pointIn(svg, event).x].map((px) => clamp(px, left, right)).sort((x, y) => x - y);
  svg.classList.add("brushed");
  svg.addEventListener("pointerdown", (event) => { from = pointIn(svg, event).x; });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const [a, b] = range(event);
    box ??= put(svg, "rect", { class: "brush", y: top, height: bottom - top });
    for (const [key, value] of [["x", a], ["width", b - a]]) box.setAttribute(key, value);
  });
  const release = (event) => {
    const [a, b] = from === null ? [0, 0] : range(event);
    from = null;
    box?.remove();
    box = null;
    if (event.type === "pointerup" && b - a > 8) done([a, b].map((px) => (px - left) / (right - left)));
  };
  for (const name of ["pointerup", "pointerleave", "pointercancel"]) svg.addEventListener(name, release);
}
// Multiples of 1, 2 or 5 times a power of ten within [low, high], about `count` of them.
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power, found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step + 0);  // -0 is 0
  return found;
}
// The texts at ticks, all with the same number of decimals.
function tickTexts(values) {
  if (values.some((y) => y && (Math.abs(y) >= 1e6 || Math.abs(y) < 1e-3))) return values.map((y) => human(y).replace(/\.?0*e/, "e"));
  const places = Math.max(0, ...values.map((y) => (String(Number(y.toPrecision(3))).split(".")[1] ?? "").length));
  const whole = values.every(Number.isInteger);
  return values.map((y) => whole ? plain(y) : y.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places }));
}
const wholeTicks = (low, high, count) => ticks(low, high, count).filter(Number.isInteger);
// Ticks on a logarithmic axis from 2**low to 2**high, as `log_ticks` in Python: powers of 10, on a short axis with 2 and
// 5 between them, or plain numbers.
function powers(low, high) {
  const [from, to] = [low, high].map((x) => x / Math.log2(10)), every = Math.max(1, Math.ceil((to - from) / 8)), found = [];
  for (let n = Math.floor(from / every) * every; n <= to; n += every) {
    found.push(...(to - from < 2.2 ? [1, 2, 5] : [1]).map((step) => Number(`${step}e${n}`)).filter((y) => Math.log2(y) >= low && Math.log2(y) <= high));
  }
  return found.length > 1 ? found : ticks(2 ** low, 2 ** high, 4);
}
// Places and texts of ticks from low to high, on a logarithmic axis from 2**low to 2**high.
function tickedFrom(low, high, log, count) {
  const at = log ? powers(low, high) : ticks(low, high, count), texts = log && at.length > 1 && at[1] / at[0] > 1.9
    ? at.map((y) => y < 1 && y > 1e-4 ? String(Number(y.toPrecision(3))) : tickTexts([y])[0]) : tickTexts(at);
  return at.map((y, i) => [y, texts[i]]);
}
// ---- charts that Python drew --------------------------------------------------------------------------------------

// The pictures of a chart, wide and narrow: each its box in pixels, and its marks with their x.
function pictured(figure, [low, high]) {
  return [...figure.querySelectorAll("svg.chart")].map((picture) => {
    const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(picture.querySelector("svg").getAttribute(name)));
    const box = { left: x + 5, right: x + width - 5, top: y, bottom: y + height, low, high };
    const across = (px) => low + (px - box.left) / (box.right - box.left) * (high - low);
    const marks = [...picture.querySelectorAll(".marks > *")].map((mark) => {
      const aside = mark.tagName === "line" ? 0 : mark.getAttribute("text-anchor") === "end" ? -4 : 4;
      return { mark, x: across(Number(mark.getAttribute("x1") ?? mark.getAttribute("x")) - aside) };
    });
    return { picture, box, marks, across };
  });
}
// Ticks and marks of a picture whose axes have changed.
function placed({ picture, box, marks }, X, Y, { ys, xs, signed }) {
  const { left, right, bottom, low, high } = box, host = picture.querySelector(".ticks");
  host.replaceChildren();
  for (const [y, text] of ys) {
    put(host, "line", { class: signed && y === 0 ? "zero" : "grid", x1: left, x2: right, y1: Y(y), y2: Y(y) });
    put(host, "text", { x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, (signed && y > 0 ? "+" : "") + text.replace("-", "−"));
  }
  for (const x of xs) put(host, "text", { x: X(x), y: bottom + 18, "text-anchor": "middle" }, plain(x));
  for (const { mark, x } of marks) {
    const px = X(x), late = px + 6.6 * mark.textContent.length + 8 > right;
    const now = mark.tagName === "line" ? { x1: px, x2: px } : { x: px + (late ? -4 : 4), "text-anchor": late ? "end" : "start" };
    for (const [key, value] of Object.entries({ ...now, visibility: x < low || x > high ? "hidden" : "visible" })) mark.setAttribute(key, value);
  }
}
// Below a chart: the ends of its axis, and the kind of the other one.
function controls(figure, x_label, whole, straight) {
  const form = put(figure, "div", { class: "controls" }), any = { type: "number", step: whole ? 1 : "any" };
  figure.querySelector(".narrow").after(form);
  put(form, "span", {}, x_label);
  const ends = ["lowest shown", "highest shown"].map((end) => put(form, "input", { ...any, "aria-label": `${said(x_label)}, ${said(end)}` }));
  const all = put(form, "button", { type: "button" }, "show all"), label = put(form, "label", {}, "logarithmic"), box = put(label, "input", { type: "checkbox" });
  label.prepend(box);
  label.hidden = straight;
  return { ends, all, box };
}
// Tooltips, a part of the x axis (dragged over, or typed) and a y axis of either kind. Charts of a page, or of a part
// of it, that share an axis show the same part of it.
const zoomed = [];
function charted(svg) {
  const { x_range, y_range, log: begun, series, signed, x_label, names } = JSON.parse(svg.dataset.chart);
  const figure = svg.closest("figure"), page = svg.closest(".part"), called = new Map(names), pictures = pictured(figure, x_range);
  const known = series.map((line) => ({ ...line, at: new Map(line.points) })), xs = known.flatMap(({ at }) => [...at.keys()]);
  const all = known.flatMap(({ at }) => [...at.values()]), whole = xs.every(Number.isInteger), text = (y) => (signed && y > 0 ? "+" : "") + human(y);
  for (const { picture, box } of pictures) follow(picture, x_label, box, xs, (x) => [
    called.get(x) ?? `${x_label} ${plain(x)}`, ...known.map(({ name, color, at }) => ({ name, color, value: text(at.get(x)) })),
  ]);
  if (new Set(xs).size < 2) return;
  const [{ box: wide, across }] = pictures, drawn = svg.querySelector("[id$=-drawn]"), groups = [...drawn.querySelectorAll("g")];
  const up = (py) => y_range[0] + (wide.bottom - py) / (wide.bottom - wide.top) * (y_range[1] - y_range[0]);
  const paths = [...drawn.querySelectorAll("path")].map((path) => {  // of a named line the measured points, else those drawn
    const d = path.getAttribute("d"), line = known[groups.indexOf(path.parentNode)], dots = d.includes("h0");
    const seen = [...d.matchAll(/([ML])([-\d.]+) ([-\d.]+)(z?)/g)].map(([, go, x, y, end]) => [go, across(Number(x)), begun ? 10 ** up(y) : up(y), end]);
    return { path, points: line ? line.points.map(([x, y]) => [dots ? "M" : "L", x, y, dots ? "h0" : ""]) : seen };
  });
  const bounds = whole ? [Math.ceil(x_range[0]), Math.floor(x_range[1])] : x_range;
  let view = x_range, log = begun;
  const f = (y) => log ? Math.log2(Math.max(y, 1e-300)) : y, fits = (y) => y !== null && (!log || y > 0);
  const { ends, all: button, box: kind } = controls(figure, x_label, whole, signed || !all.some((y) => y > 0) || all.some((y) => y < 0));
  function range() {  // of the y axis
    const own = y_range.map((y) => log ? y * Math.log2(10) : y);
    if (view === x_range && log === begun) return own;
    const ys = paths.flatMap(({ points }) => points.filter(([, x, y]) => x >= view[0] && x <= view[1] && fits(y)).map(([, , y]) => f(y)));
    const [low, high] = ys.length ? [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))] : own;
    const room = 0.04 * (high - low) || (log ? 0 : Math.abs(high) / 2) || 0.5;
    return [low - room, high + room];
  }
  function draw() {
    const [low, high] = range(), of = { ys: tickedFrom(low, high, log, 6), xs: (whole ? wholeTicks : ticks)(...view, 6), signed };
    const places = ({ left, right, top, bottom }) => [
      (x) => Number((left + (x - view[0]) / (view[1] - view[0]) * (right - left)).toFixed(1)),
      (y) => Number(clamp(bottom - (f(y) - low) / (high - low) * (bottom - top), -1e4, 1e4).toFixed(1)),
    ];
    const [X, Y] = places(wide);
    for (const { path, points } of paths) {
      let down = false;
      path.setAttribute("d", points.map(([go, x, y, end]) => {
        const first = !down;
        down = path.matches(".band") || fits(y);
        return down ? `${first ? "M" : go}${X(x)} ${Y(y)}${end}` : "";
      }).join(""));
    }
    for (const one of pictures) placed(one, ...places(Object.assign(one.box, { low: view[0], high: view[1] })), of);
    tell();
  }
  function tell() {
    ends.forEach((field, i) => { field.value = view[i] === x_range[i] ? bounds[i] : Number(view[i].toPrecision(6)); });
    button.hidden = view === x_range;
    kind.checked = log;
  }
  function show([from, to]) {
    const [a, b] = [from > bounds[0] ? from : x_range[0], to < bounds[1] ? to : x_range[1]];
    view = b > a && (a > x_range[0] || b < x_range[1]) ? [a, b] : x_range;
    draw();
  }
  const zoom = (range) => { for (const one of zoomed) if (one.page === page && one.x_label === x_label) one.show(range); };
  zoomed.push({ page, x_label, show });
  for (const { picture, box } of pictures) brushed(picture, box, (shares) => zoom(shares.map((share) => {
    const x = view[0] + share * (view[1] - view[0]);
    return whole ? Math.round(x) : x;
  })));
  for (const field of ends) field.addEventListener("change", () => zoom(ends.map((one) => Number(one.value))));
  button.addEventListener("click", () => { zoom(x_range); ends[0].focus(); });
  kind.addEventListener("change", () => { log = kind.checked; draw(); });
  tell();
}
for (const svg of document.querySelectorAll("svg[data-chart]")) charted(svg);
