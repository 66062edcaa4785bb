// What a person does to the page, and what it then reads; test_page.py gives FILES.
const change = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event('input')); };
const texts = (row) => [...row.cells].map((cell) => cell.textContent);
const row = (table, name) => [...$(table).tBodies[0].rows].map(texts).find(([first]) => first === name);
const answer = {};
change('exact', 500);
answer.clipped = row('codes', 'E4M3');
change('exact', '0.001');
answer.subnormal = row('codes', 'E4M3');
change('octaves', 20);
answer.tensorwise = row('recipes', 'tensorwise');
answer.mxfp8 = row('recipes', 'mxfp8');
$('before').firstChild.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown' }));
answer.moved = $('because').textContent;
const press = (host, x, y) => {
  const { left, top, width, height } = host.firstChild.getBoundingClientRect();
  const place = { bubbles: true, clientX: left + x * width, clientY: top + y * height };
  for (const kind of ['pointerdown', 'pointerup']) host.firstChild.dispatchEvent(new PointerEvent(kind, place));
};
press($('before'), 0.001, 0.001);
answer.corner = ['x', 'y'].map((name) => $('before').querySelector('.outlier').getAttribute(name));
press($('line'), 1, 0.5);
answer.dragged = [$('exact').value];
$('go').click();
const drop = async (name) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([FILES[name]], name));
  $('file').files = transfer.files;
  $('file').dispatchEvent(new Event('change'));
  while (!$('read').textContent.startsWith(name)) await new Promise((done) => setTimeout(done, 20));
  answer[name] = [$('read').textContent, ...[...$('column').options].map((o) => o.value)];
};
const entry = (name) => ({ name, isFile: true, file: (done) => done(new File([FILES[name]], name)) });
const batches = [[entry('notes.txt'), entry('amax.jsonl')], [entry('metrics.jsonl'), { name: 'stats', isFile: false }], []];
const runs = { name: 'run', isDirectory: true, createReader: () => ({ readEntries: (done) => done(batches.shift()) }) };
const dropFolder = async () => {  // a script cannot make a folder's entry, so this one is played
  const event = new Event('drop');
  event.dataTransfer = { items: [{ webkitGetAsEntry: () => runs }], files: [] };
  $('drop').dispatchEvent(event);
  while (!$('read').textContent.startsWith('run/')) await new Promise((done) => setTimeout(done, 20));
  answer.folder = [$('read').textContent, $('column').value, [...$('column').options].at(-1).value];
};
(async () => {
  for (const name in FILES) await drop(name);
  await dropFolder();
  while (!/A .*B /.test($('told').textContent)) await new Promise((done) => setTimeout(done, 20));
  answer.told = $('told').textContent;
  document.querySelector('[data-tongue="zh-CN"]').click();
  const { lang } = document.documentElement;
  answer.chinese = [document.querySelector('h1').innerText, texts($('codes').rows[0])[0], lang];
  document.title = JSON.stringify(answer);
})();
