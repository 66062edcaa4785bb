// What a person does to the report, for test_browser.py: each act by its name, after the page has drawn.
const set = (id, value, kind = "change") => {
  Object.assign(document.getElementById(id), { value }).dispatchEvent(new Event(kind));
};
const point = (kinds) => {
  const svg = document.querySelector("#loss svg"), box = svg.getBoundingClientRect(), clientY = box.top + 100;
  for (const [name, x] of kinds) {
    svg.dispatchEvent(new PointerEvent(name, { bubbles: true, clientX: box.left + x * box.width, clientY }));
  }
};
const press = (key) => document.querySelector("#heat svg").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const acts = {
  hover() { point([["pointermove", 0.7]]); },
  zoom() { set("from", 11); },
  axis() { document.getElementById("log").click(); },
  good() { set("run", "good"); },
  drag() { point([["pointerdown", 0.4], ["pointermove", 0.6], ["pointerup", 0.6]]); },
  keys() {
    for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"]) press(key);
    document.title = location.hash;
  },
  weight() { set("tensor", "weight"); },
  up() { set("shift", 12, "input"); },
  down() { set("shift", -16, "input"); },
  wide() { set("format", "E5M2", "input"); set("shift", -16, "input"); },
  still() { set("shift", 5, "input"); document.getElementById("reset").click(); },
  tab() { document.getElementById("patch-0-1-tab3").click(); },
};
