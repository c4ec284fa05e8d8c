// The page's data of the run: a bounded copy of the server's data, which drops the oldest first.
// Rule: all input is data, never markup or a program.
const MOST_SPANS = 250000, MOST_MARKS = 5000, MOST_ITERATIONS = 20000, MOST_HISTORIES = 64;
const GROUPS = ['coordinator', 'generation', 'inference', 'training', 'predicted'];

class Store {
  constructor() {
    this.run = {}; this.workers = new Map(); this.marks = []; this.iterations = new Map(); this.histories = new Map();
    this.tables = new Map(); this.losses = null; this.spans = 0; this.first = Infinity; this.last = -Infinity; this.changes = 0;
  }

  take(delta) {
    this.run = delta.run ?? this.run;
    for (const span of delta.spans ?? []) this.span(span);
    for (const [at, kind, words] of delta.marks ?? []) this.marks.push({ at, kind, words });
    for (const one of delta.iterations ?? []) this.iterations.set(one.iteration, one);
    for (const one of delta.histories ?? []) this.histories.set(one.iteration, one);
    if (delta.tables) this.tables = new Map(delta.tables.map((table) => [table.iteration, table.rows]));
    if (delta.losses) this.losses = delta.losses;
    this.forget();
    this.changes += 1;
  }

  span([worker, name, start, length, iteration, attributes]) {
    let row = this.workers.get(worker);
    if (!row) {
      row = { worker, group: GROUPS.findIndex((group) => worker.startsWith(group)), spans: [], longest: 0 };
      this.workers.set(worker, row);
      this.ordered = null;
    }
    const span = { name, start, end: start + length, iteration, attributes, kind: kindOf(name), row };
    let place = row.spans.length;
    while (place > 0 && row.spans[place - 1].start > start) place -= 1;
    if (place === row.spans.length) row.spans.push(span); else row.spans.splice(place, 0, span);
    row.longest = Math.max(row.longest, length);
    this.spans += 1;
    if (span.kind !== STARTING) this.first = Math.min(this.first, start);
    this.last = Math.max(this.last, span.end);
  }

  rows(predicted) {
    this.ordered ??= [...this.workers.values()].sort((a, b) => a.group - b.group || a.worker.localeCompare(b.worker, 'en', { numeric: true }));
    return this.ordered.filter((row) => row.worker.startsWith('predicted') === predicted);
  }

  forget() {
    if (this.spans > MOST_SPANS) {
      const ends = [...this.workers.values()].flatMap((row) => row.spans.map((span) => span.end));
      const until = Float64Array.from(ends).sort()[Math.floor(ends.length / 5)];
      this.spans = 0; this.first = until;
      for (const row of this.workers.values()) {
        row.spans = row.spans.filter((span) => span.end > until);
        row.longest = row.spans.reduce((most, span) => Math.max(most, span.end - span.start), 0);
        this.spans += row.spans.length;
      }
    }
    this.marks.splice(0, Math.max(0, this.marks.length - MOST_MARKS));
    for (const [map, most] of [[this.iterations, MOST_ITERATIONS], [this.histories, MOST_HISTORIES]]) {
      while (map.size > most) map.delete(Math.min(...map.keys()));
    }
  }

  // The begin and the end of an iteration; null if unknown.
  bounds(iteration) {
    const one = this.iterations.get(iteration);
    return one && one.seconds !== null ? [one.end - 1000 * one.seconds, one.end] : null;
  }

  phases(iteration, name) {
    return (this.workers.get('coordinator')?.spans ?? []).filter((span) => span.iteration === iteration && span.name === name);
  }
}

// Kinds of spans, in the order of the legend: name, colour, matching spans.
const KINDS = [
  ['decode', '#3b74d9', /^decode|^prefill/], ['score', '#2e9e6b', /^score/], ['actor forward', '#8e5bd0', /actor\/F$/], ['actor backward', '#b794e8', /actor\/B$|actor\/W$/],
  ['critic forward', '#c4407f', /critic\/F$/], ['critic backward', '#e895bb', /critic\/B$|critic\/W$/], ['wait', '#c9ced8', /wait/i], ['step', '#ece6f7', /^train\/step$/],
  ['training', '#cdb8ee', /^Training$/], ['other training', '#7a6a9b', /^train|^predicted/], ['weights', '#e08a1e', /weights|^Publishing$|^publish/], ['move', '#d23c3c', /^migrate|^balance/],
  ['checkpoint', '#8a5a2b', /checkpoint/i], ['generating', '#8fb2ec', /^Generating$/], ['scoring', '#93d0b4', /^Scoring$/], ['starting', '#e4e7ec', /^Starting$|^become/], ['other', '#98a2b3', /./],
];
const STARTING = KINDS.findIndex(([name]) => name === 'starting'), STEP = KINDS.findIndex(([name]) => name === 'step');
const known = new Map();
function kindOf(name) {
  if (!known.has(name) && known.size < 10000) known.set(name, KINDS.findIndex(([, , which]) => which.test(name)));
  return known.get(name) ?? KINDS.length - 1;
}
const workerColours = new Map();
function workerColour(worker) {
  if (!workerColours.has(worker)) workerColours.set(worker, `hsl(${(205 + 137.508 * workerColours.size) % 360} 58% ${48 + 8 * (workerColours.size % 3)}%)`);
  return workerColours.get(worker);
}
