// Facts of how a page lies, for test_layout.py.
(() => {
  const root = document.documentElement, all = [...document.body.querySelectorAll("*")];
  const seen = all.filter((e) => e.checkVisibility()), boxed = ".scroll, pre, #tip";
  const name = (e) => `${e.tagName} ${e.textContent.trim().slice(0, 60)}`, lies = (e) => e.getBoundingClientRect();
  const cut = (e) => lies(e).width && (lies(e).right > innerWidth + 1 || lies(e).left < -1) && !e.closest(boxed);
  const least = matchMedia("print").matches ? 7 : 9.5;  // paper is zoomed out
  const texts = seen.filter((e) => e.matches("svg.chart text") && e.textContent && lies(e).width);
  const box = (text) => lies(text.ownerSVGElement);
  const size = (text) => text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize);
  const near = (a, b) => Math.min(a.right - b.left, b.right - a.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
  const on = (t, i) => texts.slice(i + 1).find((u) => u.ownerSVGElement === t.ownerSVGElement && near(lies(t), lies(u)));
  const parts = seen.filter((e) => e.matches("main > *")).map(lies), h1 = document.querySelector("h1");
  const paper = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number);
  return JSON.stringify({
    over: root.scrollWidth - root.clientWidth,
    cut: seen.filter(cut).map(name),
    out: texts.filter((t) => lies(t).right > box(t).right + 2 || lies(t).left < box(t).left - 2).map(name),
    on: texts.map((t, i) => [t, on(t, i)]).filter(([, u]) => u).map(([t, u]) => `${name(t)} | ${name(u)}`),
    small: texts.filter((t) => size(t) < least).map(name),
    empty: seen.filter((e) => e.matches("svg.chart") && e.querySelectorAll("path, rect, line").length < 2).map(name),
    gaps: parts.slice(1).map(({ top }, i) => top - parts[i].bottom).filter((gap) => gap > 90),
    lines: lies(h1).height / parseFloat(getComputedStyle(h1).lineHeight), headline: h1.innerText, light: paper[0] > 127,
  });
})()
