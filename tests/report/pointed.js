// What the page tells of the right end of its first picture; for test_layout.py.
(() => {
  const chart = document.querySelector("svg[data-chart]"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 99 }));
  return document.getElementById("tip").innerText.split("\n");
})()
