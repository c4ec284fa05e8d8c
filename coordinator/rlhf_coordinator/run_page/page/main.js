// Assembles the page from embedded data, or from deltas of its server; draws when the data changed.
const POLL = 1000, POLL_OVER = 5000, NEWEST = 3;
const store = new Store(), element = (id) => document.getElementById(id);
let chosen = -1, pinned = false, following = true, asked = false, cursor = '';

const redraw = () => {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const begun = performance.now();
    timeline.draw(); samples.draw(); schedule.draw();
    document.body.dataset.drew = (performance.now() - begun).toFixed(2);
    document.body.dataset.drawn = String(1 + Number(document.body.dataset.drawn ?? 0));
    document.body.dataset.view = `${axis.from} ${axis.to}`;
  });
};
const axis = new Axis(redraw);
const touched = () => { following = false; element('follow').setAttribute('aria-pressed', 'false'); };
const timeline = new Timeline(element('workers'), store, axis, touched);
const samples = new Samples(element('samples'), store, axis, touched);
const schedule = new Schedule(element('schedule'), store, redraw);

function choose(iteration, byHand = true) {
  if (byHand) { pinned = true; touched(); }
  chosen = iteration;
  element('which').textContent = iteration < 0 ? '–' : String(iteration);
  samples.choose(iteration);
  schedule.choose(iteration);
  if (byHand) showOne();
  for (const row of element('iterations').tBodies[0].rows) row.className = Number(row.dataset.iteration) === iteration ? 'chosen' : '';
  redraw();
}

function showOne() {
  const bounds = store.bounds(chosen);
  if (bounds) { const room = 0.02 * (bounds[1] - bounds[0]); touched(); axis.show(bounds[0] - room, bounds[1] + room); }
}

function showWhole_() { touched(); axis.show(store.first, store.last + 0.01 * (store.last - store.first)); }

function follow() {
  following = true; pinned = false;
  element('follow').setAttribute('aria-pressed', 'true');
  const newest = Math.max(-1, ...store.iterations.keys()), bounds = store.bounds(Math.max(0, newest - NEWEST + 1));
  if (newest !== chosen) choose(newest, false);
  const from = bounds ? bounds[0] : store.first;
  axis.show(from, store.last + 0.02 * (store.last - from));
}

function taken(deltas) {
  for (const delta of deltas) store.take(delta);
  const { run } = store, done = store.iterations.size ? Math.max(...store.iterations.keys()) + 1 : 0;
  document.title = `${run.name || run.folder || 'run'} – rlhf`;
  element('name').textContent = visible(run.name || run.folder || 'run');
  element('phase').textContent = visible([run.algorithm, run.phase].filter(Boolean).join(', '));
  element('count').textContent = `${done}${Number.isFinite(run.iterations) ? ` of ${run.iterations}` : ''} iterations, ${store.spans.toLocaleString('en')} spans`;
  showLosses(store);
  showIterations(store, chosen, choose);
  if (deltas.some((delta) => delta.tables)) showTable(store, element('table'));
  if (following && !pinned) follow();
  redraw();
}

async function poll() {
  let wait = store.run.phase ? POLL_OVER : POLL;
  try {
    const answer = await fetch(`delta?cursor=${encodeURIComponent(cursor)}`, { cache: 'no-store' }), delta = await answer.json();
    if (!answer.ok) throw new Error(delta.error ?? `the server answers ${answer.status}`);
    cursor = delta.cursor;
    const news = delta.spans.length + delta.marks.length + delta.iterations.length + delta.histories.length || delta.tables || delta.losses || delta.run.phase !== store.run.phase;
    if (news) taken([delta]);
    element('state').textContent = delta.more ? 'reading…' : store.run.phase ? '' : 'live';
    document.body.dataset.ready = String(!delta.more);
    wait = delta.more ? 0 : store.run.phase ? POLL_OVER : POLL;
  } catch (error) {
    element('state').textContent = `not up to date: ${error.message}`;
    wait = POLL_OVER;
  }
  setTimeout(poll, wait);
}

element('whole').addEventListener('click', showWhole_);
element('one').addEventListener('click', showOne);
element('follow').addEventListener('click', follow);
element('order').addEventListener('change', (event) => { samples.order = event.target.value; redraw(); });
element('table').addEventListener('change', () => showTable(store, element('table')));
window.addEventListener('resize', redraw);
window.addEventListener('keydown', (event) => {
  if (event.target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey) return;
  ({ 0: showWhole_, i: showOne, f: follow })[event.key]?.();
});
const data = element('data').textContent;
if (data) { taken(JSON.parse(data)); document.body.dataset.ready = 'true'; element('state').textContent = 'as it was written'; } else poll();
