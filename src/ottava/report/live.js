// Follows a run: a bar at the bottom says how far it is, and loads the new page when nobody is reading closely.
(() => {
  const bar = document.createElement("div");
  bar.setAttribute("role", "status");
  bar.style.cssText = "position:fixed;bottom:0;left:0;right:0;padding:6px 16px;font-size:13px;background:var(--raised,#eee);" +
    "border-top:1px solid var(--line,#ccc);color:var(--ink,#000);display:flex;gap:14px;align-items:baseline;z-index:2";
  const text = document.createElement("span"), label = document.createElement("label"), follow = document.createElement("input");
  follow.type = "checkbox";
  follow.checked = sessionStorage.getItem("ottava-follow") !== "no";
  follow.onchange = () => { sessionStorage.setItem("ottava-follow", follow.checked ? "yes" : "no"); show(); };
  label.append(follow, " follow");
  label.style.marginLeft = "auto";
  bar.append(text, label);
  document.body.append(bar);
  document.body.style.paddingBottom = "40px";
  let state = LIVE, touched = 0;
  const QUIET = 3000;  // milliseconds without mouse or key: nobody is in the middle of something
  for (const kind of ["pointermove", "pointerdown", "keydown", "wheel"]) addEventListener(kind, () => { touched = Date.now(); }, { passive: true });
  const words = { waiting: "waiting for the first step", running: "running", ended: "the run has ended", gone: "the folder is gone", stopped: "the server was stopped", lost: "no server: it was stopped" };
  function show() {
    const fresh = state.version !== LIVE.version && state.steps !== LIVE.steps;
    text.textContent = `${words[state.state]} · ${state.steps} steps${fresh ? ` · this page shows ${LIVE.steps}` : ""}${state.why ? ` · ${state.why}` : ""}`;
    if (!follow.checked || state.version === LIVE.version || !["running", "ended"].includes(state.state)) return;
    if (Date.now() - touched < QUIET) setTimeout(show, QUIET); else location.reload();  // the browser keeps the place
  }
  const told = new EventSource("events");
  told.onmessage = (event) => { state = JSON.parse(event.data); if (state.state === "stopped") told.close(); show(); };
  told.onerror = () => { if (state.state !== "stopped") { state = { ...state, state: "lost", why: "" }; show(); } };
  show();
})();
