// What a person does to the chart of a page with the longest axis, for test_layout.py, and what it shows before and after.
(() => {
  const long = (one) => JSON.parse(one.dataset.chart).x_range[1];
  const svg = [...document.querySelectorAll("svg[data-chart]")].sort((a, b) => long(b) - long(a))[0], figure = svg.closest("figure"), found = {};
  const seen = [...figure.querySelectorAll("svg.chart")].find((one) => one.checkVisibility());
  const [low, high] = figure.querySelectorAll("input[type=number]"), [all, kind] = ["button", "input[type=checkbox]"].map((one) => figure.querySelector(one));
  const tell = (name) => {
    const shown = [...document.querySelectorAll("figure:has(.controls)")].map((one) => [...one.querySelectorAll("input[type=number]")].map(({ value }) => Number(value)).join());
    const paths = [...svg.querySelectorAll("[id$=-drawn] path")].map((path) => path.getAttribute("d"));
    const ticks = [...seen.querySelectorAll(".ticks text")].map(({ textContent }) => textContent);
    found[name] = { shown, paths, ticks, log: kind.checked, all: !all.hidden, wide: svg === seen };
  };
  const at = (name, share) => {
    const box = seen.querySelector("svg").getBoundingClientRect(), x = box.left + share * box.width;
    seen.dispatchEvent(new PointerEvent(name, { bubbles: true, clientX: x, clientY: box.top + 50 }));
  };
  tell("begun");
  for (const [name, share] of [["pointerdown", 0.5], ["pointermove", 0.9], ["pointermove", 1], ["pointerup", 1]]) at(name, share);
  tell("dragged");
  at("pointermove", 0.99);
  found.tip = document.getElementById("tip").innerText.split("\n")[0];
  kind.click();
  tell("other");
  all.focus();
  all.click();
  found.focus = document.activeElement === low;
  kind.click();
  tell("back");
  high.value = low.value - 1;
  high.dispatchEvent(new Event("change"));
  tell("empty");
  found.moving = document.getAnimations().length;
  return found;
})()
