// Copies the documents of all frames into the page, after their scripts have run; for test_browser.py.
onload = () => setTimeout(() => {
  for (const frame of document.querySelectorAll("iframe")) {
    const copy = document.createElement("textarea");
    copy.textContent = frame.contentDocument.documentElement.outerHTML;
    document.body.append(copy);
  }
  document.documentElement.dataset.drawn = "yes";
}, 20000);
