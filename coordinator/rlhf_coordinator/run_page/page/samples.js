// The history of each sample of an iteration: one line per sample, on the time axis of the workers.
const QUEUED = '#e4e7ec', WAITS = '#f3d9a4', SCORED = '#cfe8dc', TRAINED = '#b794e8', MOVED = '#d23c3c';

class Samples {
  constructor(canvas, store, axis, touched) {
    Object.assign(this, { canvas, store, axis, touched, iteration: -1, order: 'batch', tall: 0, top: 0 });
    attach(this);
    this.words = document.getElementById('samplewords');
  }

  choose(iteration) { this.iteration = iteration; this.tall = 0; this.top = 0; this.sorted = null; }

  get histories() { return this.store.histories.get(this.iteration); }

  places() {
    const one = this.histories;
    if (this.sorted?.of === one && this.sorted.by === this.order) return this.sorted.places;
    const by = {
      batch: (n) => n, begun: (n) => one.places[n][0]?.[0] ?? Infinity, finished: (n) => one.finished[n] ?? Infinity,
      tokens: (n) => -one.responses[n], worker: (n) => one.places[n][0]?.[1] ?? Infinity, reward: (n) => -(one.rewards[n] ?? -Infinity),
    }[this.order];
    const places = one.prompts.map((_, n) => n).sort((a, b) => { const [x, y] = [by(a), by(b)]; return x === y ? a - b : x < y ? -1 : 1; });
    this.sorted = { of: one, by: this.order, places };
    key(document.getElementById('stages'), [['queued', QUEUED], ...one.workers.slice(0, 24).map((worker) => [`decoded on ${worker}`, workerColour(worker)]),
      ['waits for its score', WAITS], ['scored', SCORED], ['trained', TRAINED], ['moved', MOVED]]);
    return places;
  }

  get height() { return Math.max(60, Math.min(420, (this.histories?.prompts.length ?? 0) * 14)); }

  lines(one) {
    const least = this.height / one.prompts.length;
    this.tall = Math.max(least, Math.min(40, this.tall));
    this.top = Math.max(0, Math.min(this.top, one.prompts.length * this.tall - this.height));
    return this.tall;
  }

  draw() {
    const one = this.histories, [context, width, height] = cleared(this.canvas, TOP + this.height);
    drawTicks(context, this.axis, width, height, this.store.first);
    if (!one) {
      context.fillStyle = '#667085';
      context.fillText('nothing is recorded of the samples of this iteration: it is not finished, or spec.metrics is Disabled', LEFT + 8, TOP + 24);
      return;
    }
    const places = this.places(), tall = this.lines(one), rectangles = new Rectangles(), ticks = new Rectangles();
    const training = this.training(), gap = tall > 4 ? 1 : 0;
    const x = (at) => Math.min(width, Math.max(LEFT, this.axis.x(at, width)));
    const bar = (colour, from, to, y) => { const left = x(from), right = x(to); if (right > left) rectangles.add(colour, left, y, right - left, Math.max(0.5, tall - gap)); };
    for (let line = Math.floor(this.top / tall); line < places.length && line * tall - this.top < this.height; line += 1) {
      const n = places[line], y = TOP + line * tall - this.top;
      for (const part of this.partsOf(one, n, training)) {
        if (part.to < this.axis.from || part.from > this.axis.to) continue;
        bar(part.colour, part.from, part.to, y);
        if (part.moved && part.from > this.axis.from && part.from < this.axis.to) ticks.add(MOVED, Math.round(x(part.from)) - 1, Math.round(y), 2, Math.max(2, Math.round(tall - gap)));
      }
      if (tall >= 9) { context.fillStyle = '#1c2330'; context.fillText(`sample ${n}`, 4, y + tall / 2); }
    }
    rectangles.fill(context);
    ticks.fill(context);
    context.fillStyle = '#ffffff'; context.fillRect(0, 0, width, TOP - 1);
    drawTicks(context, this.axis, width, TOP, this.store.first);
  }

  // The interval of the iteration's training, searched again only after new data.
  training() {
    if (this.trained?.changes !== this.store.changes || this.trained.iteration !== this.iteration) {
      this.trained = { changes: this.store.changes, iteration: this.iteration, span: this.store.phases(this.iteration, 'Training')[0] };
    }
    return this.trained.span;
  }

  partsOf(one, n, training) {
    if (this.made?.of !== one || this.made.training !== training) this.made = { of: one, training, parts: [] };
    return (this.made.parts[n] ??= parts(one, n, training));
  }

  vertical(factor, y) {
    const one = this.histories;
    if (!one) return;
    const before = this.lines(one), line = (this.top + y - TOP) / before;
    this.tall = before * factor;
    this.top = line * this.lines(one) - (y - TOP);
    this.axis.changed();
  }

  scroll(pixels) { this.top += pixels; }

  hit(x, y) {
    const one = this.histories;
    if (!one || y < TOP) return null;
    const n = this.places()[Math.floor((this.top + y - TOP) / this.lines(one))];
    return n === undefined ? null : sampleWords(one, n, this.training(), this.axis.at(x, this.canvas.clientWidth));
  }
}

// The intervals in the history of one sample, in milliseconds since the Unix epoch.
function parts(one, n, training) {
  const began = one.began_ns / 1e6, at = (seconds) => began + 1000 * seconds, found = [], places = one.places[n];
  const finished = one.finished[n], scored = one.scored[n], ends = finished ?? scored;
  if (places.length && places[0][0] > 0) found.push({ stage: 'queued', colour: QUEUED, from: began, to: at(places[0][0]) });
  places.forEach(([from, worker], number) => {
    const to = places[number + 1]?.[0] ?? ends;
    if (to === null || to < from) return;
    const before = places.slice(0, number).findLast((place) => place[1] >= 0);
    const name = worker < 0 ? 'queued again' : `decoding on ${one.workers[worker]}`;
    found.push({ stage: name, colour: worker < 0 ? QUEUED : workerColour(one.workers[worker]), from: at(from), to: at(to), moved: worker >= 0 && before !== undefined && before[1] !== worker });
  });
  if (finished !== null && scored !== null) found.push({ stage: 'waits for its score', colour: WAITS, from: at(finished), to: at(scored) });
  if (scored !== null && training && one.left_out[n] === undefined) {
    found.push({ stage: 'scored', colour: SCORED, from: at(scored), to: training.start });
    found.push({ stage: 'trained', colour: TRAINED, from: training.start, to: training.end });
  }
  return found;
}

function sampleWords(one, n, training, moment) {
  const stretches = parts(one, n, training), now = stretches.find((part) => part.from <= moment && part.to >= moment);
  const words = [`sample ${n}${now ? `: ${now.stage}, ${duration(now.to - now.from)}` : ''}`, `${one.prompts[n]} tokens of prompt, ${one.responses[n]} of response`];
  words.push(`weights ${one.versions[n].map(([version, tokens]) => `v${version}: ${tokens} tokens`).join(', ') || 'not known'}`);
  words.push(one.drafted[n] ? `${one.accepted[n]} of ${one.drafted[n]} drafted tokens accepted` : 'nothing was drafted for it');
  words.push(`reward ${one.rewards[n] ?? 'none'}`);
  if (one.left_out[n] !== undefined) words.push(`not trained on: ${one.left_out[n]}`);
  for (const part of stretches) words.push(`${part.stage}${part.moved ? ' (moved)' : ''}: ${duration(part.to - part.from)}`);
  return words.join('\n');
}
