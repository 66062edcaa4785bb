// Follows a run that goes on: new steps are appended to the curves, a new page takes the place of the old one. Zoom,
// selected cell, open details and the place on the page stay. The server says "Live: step 5; 2 ranks", "no step yet" or
// "The run has ended at step 9".
const address = location.pathname, query = new URLSearchParams({ page: $("live").dataset.page });
const source = new EventSource(`events?${query}`), told = { kind: "", text: "" };
function say(kind, text) {
  Object.assign(told, { kind, text });
  Object.assign($("live"), { className: kind, textContent: said(text) });
}
source.addEventListener("steps", async ({ data }) => (await shown).append(JSON.parse(data)));
source.addEventListener("state", ({ data }) => {
  const { kind, text } = JSON.parse(data);
  say(kind, text);
  if (kind === "stopped") source.close();
});
source.addEventListener("error", () => {
  if (source.readyState !== EventSource.CLOSED || told.kind !== "stopped") say("gone", "No answer from the server; this page stays as it is.");
});
// One page at a time: what arrives while a page is drawn asks for one more.
let busy = false, again = false;
async function renew() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const text = await (await fetch(address, { cache: "no-store" })).text();
    const fresh = new DOMParser().parseFromString(text, "text/html"), before = await shown, top = scrollY;
    const open = new Map([...document.querySelectorAll("details")].map((box) => [box.querySelector("summary").textContent, box.open]));
    const inputs = Object.fromEntries(["log", "run"].map((id) => [id, $(id) && { checked: $(id).checked, value: $(id).value }]));
    const kept = before.leave(), focused = document.activeElement?.id;
    for (const id of ["facts", "numbers"]) $(id).textContent = fresh.getElementById(id).textContent;
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.title = fresh.title;
    say(told.kind, told.text);
    for (const box of document.querySelectorAll("details")) box.open = open.get(box.querySelector("summary").textContent) ?? box.open;
    shown = show(kept);
    const made = await shown, slot = made.find(kept.cast);
    if (kept.cast && slot >= 0) location.replace(location.hash.replace(/slot=\d+/, `slot=${slot}`));
    for (const [id, input] of Object.entries(inputs)) if (input && $(id) && ($(id).checked !== input.checked || $(id).value !== input.value)) {
      Object.assign($(id), input);
      $(id).dispatchEvent(new Event("change"));
    }
    if (focused) $(focused)?.focus({ preventScroll: true });
    scrollTo({ top, behavior: "instant" });
  } finally {
    busy = false;
    if (again) { again = false; renew(); }
  }
}
source.addEventListener("page", renew);
addEventListener("pagehide", () => source.close());
