// Questions to a Prometheus, and its answers as the data frames that Grafana's libraries draw.
// Rule: an answer that is no success is an error with its words; a gap between samples stays a gap.
import { createDataFrame, type DataFrame, FieldType, type Labels, renderLegendFormat } from '@grafana/data';

import { type Target } from './dashboard';

export interface Moment {
  from: number; // seconds since 1970
  to: number;
  step: number; // seconds between two points
}

interface Series {
  metric: Labels;
  value?: [number, string];
  values?: Array<[number, string]>;
}

const BASE = new URLSearchParams(window.location.search).get('prometheus') ?? '/prometheus';

export async function ask<T>(path: string, given: Record<string, string>): Promise<T> {
  const answer = await fetch(`${BASE}/api/v1/${path}?${new URLSearchParams(given)}`);
  const body = await answer.json();
  if (body.status !== 'success') {
    throw new Error(`${path} ${given.query ?? ''}: ${body.error}`);
  }
  return body.data as T;
}

export async function frames(target: Target, expression: string, when: Moment): Promise<DataFrame[]> {
  if (target.instant) {
    const data = await ask<{ resultType: string; result: Series[] }>('query', {
      query: expression,
      time: String(when.to),
    });
    const series = data.resultType === 'scalar' ? [{ metric: {}, value: data.result as unknown as [number, string] }] : data.result;
    return target.format === 'table' ? [table(target, series)] : series.map((item) => line(target, item, when));
  }
  const data = await ask<{ result: Series[] }>('query_range', {
    query: expression,
    start: String(when.from),
    end: String(when.to),
    step: String(when.step),
  });
  return data.result.map((item) => line(target, item, when));
}

// One series as a frame of time and value, with a row without a value where samples are missing.
function line(target: Target, series: Series, when: Moment): DataFrame {
  const times: number[] = [];
  const values: Array<number | null> = [];
  for (const [time, value] of series.values ?? (series.value ? [series.value] : [])) {
    if (times.length && time * 1000 - times[times.length - 1] > when.step * 1500) {
      times.push(times[times.length - 1] + when.step * 1000);
      values.push(null);
    }
    times.push(time * 1000);
    values.push(number(value));
  }
  return createDataFrame({
    refId: target.refId,
    name: legend(target, series.metric),
    fields: [
      { name: 'Time', type: FieldType.time, values: times, config: { interval: when.step * 1000 } },
      {
        name: 'Value',
        type: FieldType.number,
        values,
        labels: series.metric,
        config: { displayNameFromDS: legend(target, series.metric) },
      },
    ],
  });
}

// All series of an instant query as the rows of one frame: time, a column for each label, and the value.
function table(target: Target, series: Series[]): DataFrame {
  const labels = [...new Set(series.flatMap((item) => Object.keys(item.metric)))].sort();
  const rows = series.flatMap((item) => (item.value ? [{ metric: item.metric, value: item.value }] : []));
  return createDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: rows.map((row) => row.value[0] * 1000) },
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        values: rows.map((row) => row.metric[label] ?? ''),
        config: { filterable: true },
      })),
      { name: `Value #${target.refId}`, type: FieldType.number, values: rows.map((row) => number(row.value[1])) },
    ],
  });
}

function legend(target: Target, labels: Labels): string {
  if (target.legendFormat && target.legendFormat !== '__auto') {
    return renderLegendFormat(target.legendFormat, labels);
  }
  const { __name__: name = '', ...rest } = labels;
  const pairs = Object.entries(rest).map(([key, value]) => `${key}="${value}"`);
  return name + (pairs.length || !name ? `{${pairs.join(', ')}}` : '');
}

function number(text: string): number | null {
  const value = text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text);
  return Number.isNaN(value) ? null : value;
}
