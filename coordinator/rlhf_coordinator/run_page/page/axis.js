// A time axis with scrolling and zooming, and the canvases that share it.
const LEFT = 108, TOP = 18;

class Axis {
  constructor(changed) { this.from = 0; this.to = 1; this.changed = changed; }
  show(from, to) { if (to > from && Number.isFinite(to - from)) { this.from = from; this.to = to; this.changed(); } }
  x(at, width) { return LEFT + (at - this.from) / (this.to - this.from) * (width - LEFT); }
  at(x, width) { return this.from + (x - LEFT) / (width - LEFT) * (this.to - this.from); }
  zoom(factor, at) {
    const span = Math.min(4e9, Math.max(0.05, (this.to - this.from) * factor)), share = (at - this.from) / (this.to - this.from);
    this.show(at - share * span, at + (1 - share) * span);
  }
  move(by) { this.show(this.from + by, this.to + by); }
}

// Handles dragging, zooming and hovering on a canvas. `panel`: {canvas, axis, draw, hit(x, y), vertical(factor, y), scroll(pixels), touched()}.
function attach(panel) {
  const { canvas, axis } = panel;
  let held = null;
  canvas.addEventListener('wheel', (event) => {
    event.preventDefault();
    const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY || event.deltaX)) * 0.006);
    if (event.shiftKey && panel.vertical) panel.vertical(1 / factor, event.offsetY);
    else { panel.touched?.(); axis.zoom(factor, axis.at(Math.max(LEFT, event.offsetX), canvas.clientWidth)); }
  }, { passive: false });
  canvas.addEventListener('pointerdown', (event) => { held = [event.offsetX, event.offsetY]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener('pointerup', () => { held = null; });
  canvas.addEventListener('pointermove', (event) => {
    if (held) {
      const by = (held[0] - event.offsetX) / (canvas.clientWidth - LEFT) * (axis.to - axis.from);
      panel.scroll?.(held[1] - event.offsetY);
      held = [event.offsetX, event.offsetY];
      tip(null);
      panel.touched?.();
      axis.move(by);
    } else tip(panel.hit(event.offsetX, event.offsetY), event.clientX, event.clientY);
  });
  canvas.addEventListener('pointerleave', () => tip(null));
  canvas.addEventListener('keydown', (event) => {
    const step = (axis.to - axis.from) / 8, middle = (axis.from + axis.to) / 2;
    const done = { ArrowLeft: () => axis.move(-step), ArrowRight: () => axis.move(step), '+': () => axis.zoom(0.7, middle), '-': () => axis.zoom(1.4, middle) }[event.key];
    if (done) { event.preventDefault(); panel.touched?.(); done(); }
  });
}

// Clears a canvas and sets it to its displayed size; returns [context, width, height].
function cleared(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); }
  const context = canvas.getContext('2d', { alpha: false });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = '#ffffff';
  context.fillRect(0, 0, width, height);
  context.font = '11px system-ui, "DejaVu Sans", sans-serif';
  context.textBaseline = 'middle';
  return [context, width, height];
}

function drawTicks(context, axis, width, height, origin) {
  const rough = (axis.to - axis.from) / Math.max(2, (width - LEFT) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  context.strokeStyle = '#eef0f4'; context.fillStyle = '#667085'; context.beginPath();
  for (let at = origin + Math.ceil((axis.from - origin) / step) * step; at <= axis.to; at += step) {
    const x = Math.round(axis.x(at, width)) + 0.5;
    context.moveTo(x, TOP); context.lineTo(x, height);
    context.fillText(duration(at - origin, step), x + 3, TOP / 2);
  }
  context.stroke();
}

function duration(milliseconds, step = 0) {
  const size = step || Math.abs(milliseconds);
  if (size < 1000 && Math.abs(milliseconds) < 1000) return `${+milliseconds.toFixed(size < 1 ? 2 : size < 10 ? 1 : 0)} ms`;
  const seconds = milliseconds / 1000;
  if (Math.abs(seconds) < 120) return `${+seconds.toFixed(size < 10 ? 3 : size < 1000 ? 2 : 1)} s`;
  const sign = seconds < 0 ? '-' : '', whole = Math.abs(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const rest = (whole % 60).toFixed(size < 1000 ? 2 : 0).padStart(size < 1000 ? 5 : 2, '0');
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, '0')}:${rest}` : `${sign}${minutes}:${rest}`;
}

// Collects rectangles by colour, to set each fill style once.
class Rectangles {
  constructor() { this.byColour = new Map(); }
  add(colour, x, y, width, height) {
    let list = this.byColour.get(colour);
    if (!list) this.byColour.set(colour, (list = []));
    list.push(x, y, width, height);
  }
  fill(context) {
    for (const [colour, list] of this.byColour) {
      context.fillStyle = colour;
      for (let at = 0; at < list.length; at += 4) context.fillRect(list[at], list[at + 1], list[at + 2], list[at + 3]);
    }
  }
}

function firstAfter(spans, at) {
  let low = 0, high = spans.length;
  while (low < high) { const middle = (low + high) >> 1; if (spans[middle].start < at) low = middle + 1; else high = middle; }
  return low;
}

const tipElement = document.getElementById('tip');
function tip(words, x = 0, y = 0) {
  tipElement.hidden = !words;
  if (!words) return;
  tipElement.textContent = words;
  tipElement.style.left = `${Math.min(x + 14, window.innerWidth - tipElement.offsetWidth - 8)}px`;
  tipElement.style.top = `${Math.min(y + 14, window.innerHeight - tipElement.offsetHeight - 8)}px`;
}

function key(element, entries) {
  element.replaceChildren(...entries.map(([name, colour]) => {
    const item = document.createElement('span'), dot = document.createElement('i');
    dot.style.background = colour;
    item.append(dot, name);
    return item;
  }));
}
