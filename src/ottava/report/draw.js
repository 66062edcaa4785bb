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
function crossed(svg, axis, { left, right, top, bottom, low, high }) {
  const cross = put(svg, "line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  svg.pointed = (one, x) => {
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
// A tooltip for curves: the lines of describe(x) for the nearest of xs.
function follow(svg, axis, box, xs, describe) {
  const { left, right, low, high } = box;
  crossed(svg, axis, box);
  hover(svg, (px) => {
    if (!xs.length) return null;
    const x = low + (px - left) / (right - left) * (high - low);
    const near = xs.reduce((best, v) => Math.abs(v - x) < Math.abs(best - x) ? v : best);
    pointAt(axis, near);
    return describe(near);
  });
}
// Tooltips of the curves that Python drew; a difference has its sign.
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { box, x_range: [low, high], series, signed, x_label, names } = JSON.parse(svg.dataset.chart);
  const known = series.map(({ points, ...line }) => ({ ...line, at: new Map(points) }));
  const called = new Map(names), text = (y) => (signed && y > 0 ? "+" : "") + human(y);
  follow(svg, x_label, { ...box, low, high }, known.flatMap(({ at }) => [...at.keys()]), (x) => [
    called.get(x) ?? `${x_label} ${plain(x)}`, ...known.map(({ name, color, at }) => ({ name, color, value: text(at.get(x)) })),
  ]);
}
