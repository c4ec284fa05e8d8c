// One training step: for each rank the prediction above the measurement.
class Schedule {
  constructor(canvas, store, changed) {
    Object.assign(this, { canvas, store, axis: new Axis(changed), iteration: -1, number: 0 });
    attach(this);
    document.getElementById('before').addEventListener('click', () => this.go(-1));
    document.getElementById('after').addEventListener('click', () => this.go(1));
  }

  ranks() {
    if (this.known?.changes !== this.store.changes) {
      const rows = this.store.rows(false).filter((row) => GROUPS[row.group] !== 'coordinator' && row.spans.some((span) => span.kind === STEP));
      this.known = { changes: this.store.changes, rows };
    }
    return this.known.rows;
  }

  steps() {
    if (this.seen?.changes === this.store.changes && this.seen.iteration === this.iteration) return this.seen.steps;
    const first = this.ranks()[0], steps = first ? first.spans.filter((span) => span.kind === STEP && span.iteration === this.iteration) : [];
    this.seen = { changes: this.store.changes, iteration: this.iteration, steps };
    return steps;
  }

  choose(iteration) { this.iteration = iteration; this.number = 0; this.fit(); }

  go(by) { this.number = Math.max(0, Math.min(this.steps().length - 1, this.number + by)); this.fit(); }

  fit() {
    const step = this.steps()[this.number];
    if (step) this.axis.show(0, 1.02 * Math.max(step.end - step.start, Number(step.attributes.predicted_ms) || 0));
  }

  // [measured, predicted] bars of one rank: {name, from, to, words}, with times from the beginning of the step.
  bars(row) {
    const place = `${this.iteration} ${this.number} ${this.store.changes}`;
    if (this.made?.place !== place) this.made = { place, rows: new Map() };
    if (!this.made.rows.has(row)) this.made.rows.set(row, this.makeBars(row));
    return this.made.rows.get(row);
  }

  makeBars(row) {
    const steps = row.spans.filter((span) => span.kind === STEP && span.iteration === this.iteration), step = steps[this.number];
    if (!step) return [[], []];
    const measured = [], predicted = [];
    for (let at = firstAfter(row.spans, step.start); at < row.spans.length && row.spans[at].start < step.end; at += 1) {
      const span = row.spans[at];
      if (span === step) continue;
      measured.push({ kind: span.kind, name: span.name, from: span.start - step.start, to: span.end - step.start, span });
      const from = Number(span.attributes.predicted_start_ms), took = Number(span.attributes.predicted_ms);
      if (Number.isFinite(from) && Number.isFinite(took)) predicted.push({ kind: span.kind, name: `${span.name}, predicted`, from, to: from + took, span });
    }
    return [measured, predicted];
  }

  draw() {
    const ranks = this.ranks(), tall = 16, [context, width, height] = cleared(this.canvas, TOP + Math.max(1, ranks.length) * (2 * tall + 6) + 4);
    const step = this.steps()[this.number], words = document.getElementById('stepwords');
    document.getElementById('step').textContent = step ? `step ${this.number + 1} of ${this.steps().length} of iteration ${this.iteration}` : `no step of iteration ${this.iteration} is recorded`;
    words.textContent = step ? `${step.attributes.schedule ?? ''}: measured ${duration(step.end - step.start)}${step.attributes.predicted_ms ? `, predicted ${duration(Number(step.attributes.predicted_ms))}` : ''}` : '';
    drawTicks(context, this.axis, width, height, 0);
    if (!step) return;
    const rectangles = new Rectangles();
    this.shown = ranks.map((row, number) => {
      const y = TOP + number * (2 * tall + 6), [measured, predicted] = this.bars(row);
      context.fillStyle = '#1c2330'; context.fillText(row.worker.slice(0, 14), 4, y + tall);
      context.fillStyle = '#667085'; context.fillText('pred.', 76, y + tall / 2); context.fillText('meas.', 76, y + 1.5 * tall);
      [predicted, measured].forEach((bars, line) => {
        for (const bar of bars) {
          const from = Math.max(LEFT, this.axis.x(bar.from, width)), to = Math.min(width, this.axis.x(bar.to, width));
          if (to > from) rectangles.add(KINDS[bar.kind][1], from, y + line * tall + 1, Math.max(0.7, to - from), tall - 2);
        }
      });
      return { row, y, lines: [predicted, measured] };
    });
    rectangles.fill(context);
  }

  hit(x, y) {
    const tall = 16, rank = this.shown?.find((one) => y >= one.y && y < one.y + 2 * tall);
    if (!rank) return null;
    const at = this.axis.at(x, this.canvas.clientWidth), bar = rank.lines[Math.floor((y - rank.y) / tall)].find((one) => one.from <= at && one.to >= at);
    if (!bar) return null;
    const { stage, microbatch, predicted_ms } = bar.span.attributes;
    return `${rank.row.worker}  ${bar.name}\n${duration(bar.to - bar.from)} from ${duration(bar.from)} of the step${microbatch ? `\nmicro-batch ${microbatch}, stage ${stage}` : ''}${predicted_ms ? `\npredicted ${duration(Number(predicted_ms))}, measured ${duration(bar.span.end - bar.span.start)}` : ''}`;
  }
}
