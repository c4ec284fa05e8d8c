// The variables of a dashboard: what each can be, what is chosen, and their places in queries and links.
// Rule: a variable that a query names and nobody knows is an error, as it would match nothing and show an empty panel.
import { dateMath, type ScopedVars } from '@grafana/data';

import { type DashboardJson, type VariableJson } from './dashboard';
import { ask, type Moment } from './prometheus';

const ALL = '$__all';
const LABEL_VALUES = /^label_values\((?:(?<metric>.+),\s*)?(?<label>\w+)\)$/s;
const NAMED = /\$(\w+)|\$\{(\w+(?:\.[\w.]+)?)(?::(\w+))?\}|\[\[(\w+)\]\]/g;
const POINTS = 300; // of a graph half a page wide; Grafana asks for about one a pixel
const SCRAPE_INTERVAL = Number(new URLSearchParams(window.location.search).get('scrape') ?? '15'); // seconds

export interface Chosen {
  name: string;
  label: string;
  text: string;
  pattern: string; // regular expression that a query matches labels by
}

export function moment(from: string, to: string, interval?: string): Moment {
  const start = dateMath.toDateTime(from, { roundUp: false })!.valueOf() / 1000;
  const end = dateMath.toDateTime(to, { roundUp: true })!.valueOf() / 1000;
  const least = interval ? seconds(interval) : SCRAPE_INTERVAL;
  const step = Math.max(least, Math.ceil((end - start) / POINTS));
  return { from: Math.floor(start / step) * step, to: Math.ceil(end / step) * step, step };
}

// Reads `var-NAME` of the address for each variable, All where it has none; in order, since one narrows the next.
export async function choose(dashboard: DashboardJson, when: Moment): Promise<Chosen[]> {
  const address = new URLSearchParams(window.location.search);
  const chosen: Chosen[] = [];
  for (const variable of dashboard.templating?.list ?? []) {
    if (variable.type === 'datasource') {
      chosen.push({ name: variable.name, label: variable.label ?? variable.name, text: 'Prometheus', pattern: 'prometheus' });
      continue;
    }
    const given = address.getAll(`var-${variable.name}`).filter((value) => value !== ALL);
    const found = given.length ? given : await options(variable, chosen, when);
    const all = !given.length && variable.includeAll;
    const values = all ? found : (given.length ? given : found.slice(0, 1));
    const pattern = all && variable.allValue ? variable.allValue : `(${values.map(escaped).join('|')})`;
    chosen.push({
      name: variable.name,
      label: variable.label ?? variable.name,
      text: all ? `All (${found.join(', ') || 'none'})` : values.join(', '),
      pattern,
    });
  }
  return chosen;
}

async function options(variable: VariableJson, chosen: Chosen[], when: Moment): Promise<string[]> {
  const text = typeof variable.query === 'string' ? variable.query : (variable.query?.query ?? '');
  const asked = LABEL_VALUES.exec(text.trim())?.groups;
  if (!asked) {
    throw new Error(`variable ${variable.name}: the page knows label_values() alone, not ${text}`);
  }
  const given: Record<string, string> = { start: String(when.from), end: String(when.to) };
  if (asked.metric) {
    given['match[]'] = interpolate(asked.metric, chosen, when);
  }
  return ask<string[]>(`label/${asked.label}/values`, given);
}

// The text with every variable replaced; `scoped` are Grafana's own of one value, such as __data and __field.
export function interpolate(text: string, chosen: Chosen[], when: Moment, scoped: ScopedVars = {}): string {
  return text.replace(NAMED, (whole, plain, braced, format, brackets) => {
    const name: string = plain ?? braced ?? brackets;
    const known = chosen.find((item) => item.name === name);
    if (known) {
      return format === 'text' ? known.text : known.pattern;
    }
    const built = builtin(name, when);
    if (built !== undefined) {
      return built;
    }
    if (name.split('.')[0] in scoped || name.startsWith('__')) {
      return whole;
    }
    throw new Error(`no variable ${name} for ${text}`);
  });
}

function builtin(name: string, when: Moment): string | undefined {
  const range = when.to - when.from;
  return {
    __interval: `${when.step}s`,
    __interval_ms: `${when.step * 1000}`,
    // Grafana's rule: four scrapes, or an interval and a scrape, whichever is longer.
    __rate_interval: `${Math.max(when.step + SCRAPE_INTERVAL, 4 * SCRAPE_INTERVAL)}s`,
    __range: `${range}s`,
    __range_s: `${range}`,
    __range_ms: `${range * 1000}`,
    __from: `${when.from * 1000}`,
    __to: `${when.to * 1000}`,
  }[name];
}

function escaped(value: string): string {
  return value.replace(/[\\^$.*+?()[\]{}|]/g, '\\$&').replace(/\\/g, '\\\\');
}

function seconds(interval: string): number {
  const [, count, unit] = /^>?(\d+)(ms|s|m|h|d)$/.exec(interval) ?? [];
  if (!count) {
    throw new Error(`interval ${interval}: must be a number and ms, s, m, h or d`);
  }
  return Number(count) * { ms: 0.001, s: 1, m: 60, h: 3600, d: 86400 }[unit as 's'];
}
