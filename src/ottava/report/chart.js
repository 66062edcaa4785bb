// Draws pictures of the report as SVG, as wide as their place. It knows nothing about runs and tensors; report.js does.

const elide = (name, width) => name.length <= width ? name
  : name.slice(0, width - 1 - (width >> 1)) + "…" + name.slice(name.length - (width >> 1));

// An empty picture as wide as its place.
function canvas(host, height, label) {
  const width = Math.max(280, host.clientWidth || 1000);
  host.replaceChildren();
  const svg = put(host, "svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said(label) });
  return { svg, width, height };
}
// Curves over steps. series: {name, xs, ys, css}, null for an unknown y. Returns what callers need to draw on top.
function lines(host, { height, label, series, x: [x0, x1], log = false, dots = false, bottom = 24, top = 22, left = 56, right = 14 }) {
  const { svg, width } = canvas(host, height, label);
  const f = log ? Math.log2 : (y) => y, shown = (y) => y !== null && Number.isFinite(y) && (!log || y > 0);
  const ys = series.flatMap((s) => s.ys).filter(shown).map(f);
  let [y0, y1] = ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1];
  const pad = Math.max(0.06 * (y1 - y0), log ? 0.2 : 0) || 0.5;  // else all ticks of a flat curve read alike
  [y0, y1] = [y0 - pad, y1 + pad];
  const X = (x) => left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (width - left - right);
  const Y = (y) => height - bottom - (f(y) - y0) / (y1 - y0) * (height - top - bottom);
  for (const [y, text] of tickedFrom(y0, y1, log, height / 45)) {
    put(svg, "line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) });
    put(svg, "text", { x: left - 8, y: Y(y) + 4, "text-anchor": "end" }, text);
  }
  if (bottom > 10) for (const x of wholeTicks(x0, x1, Math.max(3, width / 110))) {
    put(svg, "text", { x: X(x), y: height - 6, "text-anchor": "middle" }, plain(x));
  }
  if (bottom > 10) put(svg, "text", { x: left - 8, y: height - 6, "text-anchor": "end" }, "step");
  let from = left, row = 9;
  for (const s of series) {
    let path = "", down = false;
    s.xs.forEach((x, i) => {
      if (shown(s.ys[i])) path += `${down ? "L" : "M"}${X(x).toFixed(1)} ${Y(s.ys[i]).toFixed(1)}`;
      down = shown(s.ys[i]);
    });
    if (path) put(svg, "path", { class: `curve ${s.css}`, d: path });
    if (path && (dots || s.xs.length === 1)) s.xs.forEach((x, i) => {
      if (shown(s.ys[i])) put(svg, "circle", { class: `dot ${s.css}`, cx: X(x), cy: Y(s.ys[i]), r: 3.5 });
    });
    const key = put(svg, "path", { class: `curve ${s.css}`, d: `M${from} ${row}h20` });
    const text = put(svg, "text", { class: "name", x: from + 26, y: row + 4 }, s.name), wide = text.getComputedTextLength();
    if (from > left && from + 26 + wide > width) {  // no room: the next line of the legend
      [from, row] = [left, row + 15];
      key.setAttribute("d", `M${from} ${row}h20`);
      text.setAttribute("x", from + 26);
      text.setAttribute("y", row + 4);
    }
    from += 50 + wide;
  }
  const box = { left, right: width - right, top, bottom: height - bottom, low: x0, high: x1 };
  follow(svg, "step", box, series.flatMap((s) => s.xs), (x) => {
    const found = series.filter((s) => s.xs.includes(x));
    return [`step ${plain(x)}`, ...found.map((s) => `${s.name} ${human(s.ys[s.xs.indexOf(x)])}`)];
  });
  return { svg, X, width, left, right, top, base: height - bottom };
}

// The outline of bars [x, end, y] from left to right: the good run's, whose name stands at {x, y}.
function outline(svg, bars, { base, x, y }) {
  const path = bars.map(([a, b, top], i) => `${a === bars[i - 1]?.[1] ? "L" : `${i ? `V${base}` : ""}M${a} ${base}L`}${a} ${top}H${b}`);
  put(svg, "path", { class: "curve faint beside", d: path.join("") + (bars.length ? `V${base}` : "") });
  put(svg, "path", { class: "curve faint beside", d: `M${x} ${y - 4}h20` });
  put(svg, "text", { class: "name", x: x + 26, y }, "the good run");
}
// Bars of a histogram with bins of width `wide` from first * wide on; mark: {at, text} or null; beside: {first, counts}
// of the good run, as an outline. Returns rows for a table.
function bars(host, { first, counts, beside, wide, title, unit, mark }) {
  const { svg, width } = canvas(host, 190, title), left = 44, right = 10, base = 156, high = 116;
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0), from = Math.min(first, beside?.counts.length ? beside.first : first);
  const length = Math.max(first + counts.length, beside ? beside.first + beside.counts.length : 0) - from;
  const each = Math.max(1, Math.ceil(length / 48)), share = (one, i) => {
    const at = from + i - one.first;
    return sum(one.counts.slice(Math.max(0, at), Math.max(0, at + each))) / (sum(one.counts) || 1);
  };
  const bins = Array.from({ length: Math.ceil(length / each) }, (_, i) => [(from + i * each) * wide, share({ first, counts }, i * each), beside ? share(beside, i * each) : 0]);
  const x0 = Math.min(bins[0]?.[0] ?? 0, mark?.at ?? Infinity) - wide / 2;
  const x1 = Math.max((bins.at(-1)?.[0] ?? 0) + each * wide, mark?.at ?? -Infinity) + wide / 2;
  const top = Math.max(...bins.flatMap(([, ...shares]) => shares), 1e-9), X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  put(svg, "text", { class: "name", x: 0, y: 12 }, title);
  for (const share of ticks(0, top, 3)) {
    const y = base - share / top * high;
    put(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y });
    put(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, `${Number((100 * share).toPrecision(3))} %`);
  }
  const rows = bins.map(([x, ...shares]) => [`${human(x)} to ${human(x + each * wide)}`, ...shares.slice(0, beside ? 2 : 1).map((one) => human(100 * one, "%"))]);
  bins.forEach(([x, share], i) => {
    const size = { x: X(x), width: Math.max(1, X(x + each * wide) - X(x) - 1), y: base - share / top * high, height: share / top * high };
    put(put(svg, "rect", { class: "bar normal", ...size }), "title", {}, rows[i].slice(0, 2).join(": "));
  });
  if (beside) outline(svg, bins.map(([x, , good]) => [X(x), X(x + each * wide), base - good / top * high]), { base, x: width - right - 110, y: 12 });
  for (const x of wholeTicks(x0, x1, 6)) put(svg, "text", { x: X(x), y: base + 16, "text-anchor": "middle" }, plain(x));
  put(svg, "text", { x: width - right, y: base + 31, "text-anchor": "end" }, unit);
  if (mark) {
    const late = X(mark.at) > width / 2;
    put(svg, "line", { class: "cross", x1: X(mark.at), x2: X(mark.at), y1: 22, y2: base });
    put(svg, "text", { x: X(mark.at) + (late ? -5 : 5), y: 30, "text-anchor": late ? "end" : "start" }, mark.text);
  }
  return rows;
}

// Replaces the contents of a table.
function fill(table, heads, rows) {
  table.tHead?.remove();
  table.tBodies[0]?.remove();
  const head = put(put(table, "thead"), "tr"), body = put(table, "tbody");
  heads.forEach((text, i) => put(head, "th", { scope: "col", class: i ? "num" : "" }, text));
  for (const row of rows) {
    const line = put(body, "tr");
    row.forEach((text, i) => put(line, i ? "td" : "th", i ? { class: "num" } : { scope: "row" }, text));
  }
}
