// The timeline: one row per worker, with its work over time.
const NEAR = 0.6; // pixels

class Timeline {
  constructor(canvas, store, axis, touched) {
    Object.assign(this, { canvas, store, axis, touched, drawn: [] });
    attach(this);
    key(document.getElementById('kinds'), KINDS.map(([name, colour]) => [name, colour]));
  }

  get rowHeight() { return Math.max(9, Math.min(22, 560 / Math.max(1, this.store.rows(false).length))); }

  draw() {
    const rows = this.store.rows(false), tall = this.rowHeight, { axis } = this;
    const [context, width, height] = cleared(this.canvas, TOP + Math.max(2, rows.length) * tall + 2);
    drawTicks(context, axis, width, height, this.store.first);
    const rectangles = new Rectangles();
    rectangles.add(KINDS[STEP][1], 0, 0, 0, 0); // the first colour is painted first: a step lies below its parts
    const scale = (width - LEFT) / (axis.to - axis.from);
    context.fillStyle = '#1c2330';
    rows.forEach((row, number) => {
      const y = TOP + number * tall;
      if (tall >= 9) context.fillText(row.worker.slice(0, 18), 4, y + tall / 2);
      const begins = new Float64Array(KINDS.length).fill(-1), ends = new Float64Array(KINDS.length).fill(-1);
      const paint = (kind) => {
        const [top, share] = slot(kind, row);
        rectangles.add(KINDS[kind][1], begins[kind], y + 1 + top * (tall - 2), Math.max(0.7, ends[kind] - begins[kind]), share * (tall - 2));
      };
      for (let at = firstAfter(row.spans, axis.from - row.longest); at < row.spans.length; at += 1) {
        const span = row.spans[at], { kind } = span;
        if (span.start > axis.to) break;
        const to = Math.min(width, LEFT + (span.end - axis.from) * scale);
        if (span.end < axis.from || to <= ends[kind]) continue;
        const from = Math.max(LEFT, LEFT + (span.start - axis.from) * scale);
        if (ends[kind] < 0 || from > ends[kind] + NEAR) { // merge spans of one kind whose gap is not visible
          if (ends[kind] >= 0) paint(kind);
          begins[kind] = from;
        }
        ends[kind] = to;
      }
      for (let kind = 0; kind < KINDS.length; kind += 1) if (ends[kind] >= 0) paint(kind);
    });
    rectangles.fill(context);
    this.drawIterations(context, width, height);
  }

  drawIterations(context, width, height) {
    context.strokeStyle = '#475467';
    for (const one of this.store.iterations.values()) {
      if (one.end < this.axis.from || one.end > this.axis.to) continue;
      const x = Math.round(this.axis.x(one.end, width)) + 0.5;
      context.beginPath(); context.moveTo(x, TOP - 4); context.lineTo(x, height); context.globalAlpha = 0.35; context.stroke(); context.globalAlpha = 1;
    }
  }

  hit(x, y) {
    const row = this.store.rows(false)[Math.floor((y - TOP) / this.rowHeight)];
    if (!row || x < LEFT) return this.hitMark(x);
    const { axis } = this, width = this.canvas.clientWidth, at = axis.at(x, width), near = 2 * (axis.to - axis.from) / width;
    let best = null;
    for (let number = firstAfter(row.spans, at - row.longest - near); number < row.spans.length; number += 1) {
      const span = row.spans[number];
      if (span.start > at + near) break;
      if (span.end >= at - near && (!best || span.end - span.start < best.end - best.start)) best = span;
    }
    return best && spanWords(best, this.store.first);
  }

  hitMark(x) {
    const at = this.axis.at(x, this.canvas.clientWidth), near = 4 * (this.axis.to - this.axis.from) / this.canvas.clientWidth;
    const mark = this.store.marks.find((one) => Math.abs(one.at - at) < near);
    return mark ? `${mark.kind}\n${mark.words}` : null;
  }
}

// The position of a span in its row: on a generation worker, scoring lies below decoding.
function slot(kind, row) {
  if (GROUPS[row.group] !== 'generation' || kind === STARTING) return [0, 1];
  return KINDS[kind][0] === 'decode' ? [0, 0.62] : [0.5, 0.5];
}

function spanWords(span, origin) {
  const more = Object.entries(span.attributes).map(([name, value]) => `${name.replaceAll('_', ' ')}: ${value}`);
  return [`${span.row.worker}  ${span.name}`, `${duration(span.end - span.start)} from ${duration(span.start - origin)}, iteration ${span.iteration}`, ...more].join('\n');
}
