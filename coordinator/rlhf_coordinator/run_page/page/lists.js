// The lists: losses in words, iterations, and the sample table. Texts of the run become text nodes, never markup.
const STAGES = { generation: '#8fb2ec', inference: '#93d0b4', training: '#b794e8', weight_update: '#e08a1e', checkpoint: '#8a5a2b', wait: '#c9ced8', other: '#98a2b3' };
const MOST_ROWS = 500;
const WORDS = new Set(['where they went', 'worker', 'prompt', 'response']); // columns of texts
// Characters that hide or reverse the text after them; they are shown as escapes.
const HIDDEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

function visible(text) { return String(text).replace(HIDDEN, (letter) => `\\u${letter.codePointAt(0).toString(16).padStart(4, '0')}`); }

function number(value, digits = 4) { return value === null || value === undefined ? '' : Number(value.toPrecision(digits)).toLocaleString('en', { maximumFractionDigits: 6 }).replace(/^-0$/, '0'); }

function cell(row, content, kind = '') {
  const made = document.createElement('td');
  made.className = kind;
  if (content instanceof Node) made.append(content); else made.textContent = content;
  row.append(made);
}

function head(table, names) {
  const row = document.createElement('tr');
  for (const name of names) {
    const made = document.createElement('th');
    made.className = WORDS.has(name) ? '' : 'number';
    made.textContent = name;
    row.append(made);
  }
  table.tHead.replaceChildren(row);
}

function showLosses(store) {
  const { losses } = store;
  document.getElementById('headline').textContent = losses?.headline || 'nothing is recorded yet: no iteration is finished, or spec.metrics is Disabled';
  const words = losses?.words ?? [];
  document.getElementById('words').replaceChildren(...(words.length || !losses?.headline ? words : ['no loss reaches 3% of an iteration']).map((text) => {
    const item = document.createElement('li');
    item.textContent = text;
    return item;
  }));
}

function stack(one) {
  const made = document.createElement('div'), seconds = Object.values(one.stages).reduce((sum, value) => sum + value, 0);
  made.className = 'stack';
  for (const [name, colour] of Object.entries(STAGES)) {
    const part = document.createElement('i');
    part.style.background = colour;
    part.style.width = `${seconds ? 100 * (one.stages[name] ?? 0) / seconds : 0}%`;
    part.title = `${name.replace('_', ' ')} ${number(one.stages[name] ?? 0, 3)} s`;
    made.append(part);
  }
  return made;
}

function showIterations(store, chosen, choose) {
  const table = document.getElementById('iterations');
  head(table, ['iteration', 'reward', 'kl', 'seconds', 'where they went', 'tokens', 'tokens/s']);
  const newest = [...store.iterations.values()].sort((a, b) => b.iteration - a.iteration).slice(0, MOST_ROWS);
  table.tBodies[0].replaceChildren(...newest.map((one) => {
    const row = document.createElement('tr');
    row.dataset.iteration = one.iteration;
    row.className = one.iteration === chosen ? 'chosen' : '';
    cell(row, one.long_round ? `${one.iteration} (long round)` : one.sorted_batch ? `${one.iteration} (sorted)` : String(one.iteration), 'number'); cell(row, number(one.reward), 'number'); cell(row, number(one.kl, 3), 'number'); cell(row, number(one.seconds, 3), 'number');
    cell(row, stack(one), 'bar'); cell(row, number(one.response_tokens, 3), 'number'); cell(row, number(one.tokens_per_second, 3), 'number');
    row.addEventListener('click', () => choose(one.iteration));
    return row;
  }));
}

function showTable(store, select) {
  const tables = [...store.tables.keys()].sort((a, b) => b - a), before = select.value;
  select.replaceChildren(...tables.map((iteration) => { const made = document.createElement('option'); made.value = made.textContent = String(iteration); return made; }));
  if (tables.map(String).includes(before)) select.value = before;
  const table = document.getElementById('rows'), rows = store.tables.get(Number(select.value)) ?? [];
  head(table, ['sample', 'reward', 'shaped reward', 'advantage', 'tokens', 'worker', 'prompt', 'response']);
  table.tBodies[0].replaceChildren(...rows.map((one) => {
    const row = document.createElement('tr');
    cell(row, String(one.sample), 'number'); cell(row, number(one.reward), 'number'); cell(row, number(one.shaped_reward), 'number'); cell(row, number(one.advantage, 3), 'number'); cell(row, String(one.tokens), 'number');
    cell(row, one.workers.map(visible).join(' → ')); cell(row, visible(one.prompt.slice(0, 200)), 'text'); cell(row, visible(one.response.slice(0, 400)), 'text');
    row.addEventListener('click', () => showWhole(one));
    return row;
  }));
}

function showWhole(one) {
  const element = document.getElementById('whole-sample'), rewards = Object.entries(one.rewards).map(([name, value]) => `${visible(name)} ${number(value)}`).join(', ');
  element.hidden = false;
  element.textContent = [
    `sample ${one.sample} of prompt ${one.group}: ${one.tokens} tokens, ${visible(one.finish)}; rewards ${rewards || 'none'}`,
    `workers ${one.workers.map(visible).join(' → ')}; weights ${one.versions.map(([version, tokens]) => `v${version}: ${tokens} tokens`).join(', ')}; ${one.accepted} of ${one.drafted} drafted tokens accepted`,
    `\nPROMPT\n${visible(one.prompt)}`, `\nRESPONSE\n${visible(one.response)}`, one.cut ? '\n(a text is longer than what is shown of it)' : '',
  ].join('\n');
}
