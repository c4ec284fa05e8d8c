// How many observations fell between two bounds of a histogram, over time.
// Rule: buckets of Prometheus are cumulative, so a cell is the difference to the bucket below it; never less than none.
import { type DataFrame, formattedValueToString, getValueFormat } from '@grafana/data';
import * as schemes from 'd3-scale-chromatic';
import { type JSX } from 'react';

import { theme } from '../fields';
import { type Cell, Cells } from './cells';
import { type KindProps } from './kind';

const FAINT = 0.25; // where in the scheme the least that is not nothing begins, on a dark ground
const LEGEND_STEPS = 5;

export function Heatmap({ panel, frames, width, height, range }: KindProps): JSX.Element {
  const options = panel.options ?? {};
  const ordered = [...frames].sort((one, other) => bound(one) - bound(other));
  const step = ordered[0].fields[0].config.interval ?? 1000;
  const counts = ordered.map((frame, row) => differences(frame, ordered[row - 1]));
  const most = Math.max(...counts.flatMap((row) => [...row.values()]));
  const color = scale(options.color?.scheme ?? 'Blues');
  const cells: Cell[] = counts.flatMap((row, index) =>
    [...row].flatMap(([time, count]) =>
      count > 0 ? [{ row: index, from: time - step, to: time, color: color(count / most) }] : []
    )
  );
  const format = getValueFormat(options.yAxis?.unit ?? 'short');
  const rows = ordered.map((frame) => (bound(frame) === Infinity ? '+Inf' : formattedValueToString(format(bound(frame)))));
  const legend = Array.from({ length: LEGEND_STEPS }, (_, index) => {
    const share = (index + 1) / LEGEND_STEPS;
    return { label: formattedValueToString(getValueFormat('short')(share * most)), color: color(share) };
  });
  return <Cells {...{ rows, cells, borders: true, fill: 1, width, height, range }} legend={options.legend?.show === false ? [] : legend} />;
}

function bound(frame: DataFrame): number {
  const text = frame.fields[1].labels?.le;
  if (text === undefined) {
    throw new Error('a heatmap wants series with the label le');
  }
  return text === '+Inf' ? Infinity : Number(text);
}

function differences(frame: DataFrame, below: DataFrame | undefined): Map<number, number> {
  const lower = new Map(below?.fields[0].values.map((time, index) => [time, below.fields[1].values[index]]));
  return new Map(
    frame.fields[0].values.map((time, index) => [time, Math.max(0, frame.fields[1].values[index] - (lower.get(time) ?? 0))])
  );
}

function scale(name: string): (share: number) => string {
  const scheme = (schemes as unknown as Record<string, (share: number) => string>)[`interpolate${name}`];
  if (!scheme) {
    throw new Error(`no scheme of colours named ${name}`);
  }
  return (share) => scheme(theme.isDark ? 1 - FAINT - share * (1 - FAINT) : FAINT + share * (1 - FAINT));
}
