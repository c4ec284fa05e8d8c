// Which state something was in, over time: a row for each series, cells of one state joined.
import { type DataFrame, type Field, FieldType, getFieldDisplayName } from '@grafana/data';
import { type JSX } from 'react';

import { type Cell, Cells } from './cells';
import { type KindProps } from './kind';

const OPAQUE = 100;

export function States({ panel, frames, width, height, range }: KindProps): JSX.Element {
  const seen = new Map<string, string>();
  const rows = frames.flatMap((frame) =>
    frame.fields.filter((field) => field.type === FieldType.number).map((field) => ({ frame, field }))
  );
  const opacity = panel.fieldConfig?.defaults.custom?.fillOpacity ?? 70;
  const cells = rows.flatMap(({ frame, field }, index) => states(frame, field, rows.length - 1 - index, opacity, seen));
  const names = rows.map(({ frame, field }) => getFieldDisplayName(field, frame, frames)).reverse();
  const legend = [...seen].map(([label, color]) => ({ label, color }));
  const fill = panel.options?.rowHeight ?? 0.9;
  return <Cells {...{ rows: names, cells, borders: false, fill, legend, width, height, range }} />;
}

function states(frame: DataFrame, field: Field, row: number, opacity: number, seen: Map<string, string>): Cell[] {
  const times = frame.fields[0].values;
  const step = frame.fields[0].config.interval ?? 1000;
  const cells: Array<Cell & { text: string }> = [];
  times.forEach((time: number, index: number) => {
    if (field.values[index] === null) {
      return;
    }
    const { text, color = 'gray' } = field.display!(field.values[index]);
    seen.set(text, color);
    const last = cells[cells.length - 1];
    if (last?.text === text && last.to === time) {
      last.to = time + step;
    } else {
      cells.push({ row, from: time, to: time + step, color: `color-mix(in srgb, ${color} ${(opacity * 100) / OPAQUE}%, transparent)`, text });
    }
  });
  return cells;
}
