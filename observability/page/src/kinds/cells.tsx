// Cells over time in rows: what heatmaps and state timelines are made of. Their panels are part of Grafana's server and in
// none of its libraries, so the cells are painted here, on Grafana's own chart with its axes, units and colours.
import { AxisPlacement, ScaleDirection, ScaleOrientation, UPlotChart, UPlotConfigBuilder, VizLayout, VizLegend } from '@grafana/ui';
import { LegendDisplayMode, type LegendPlacement } from '@grafana/schema';
import { type TimeRange } from '@grafana/data';
import { type JSX } from 'react';

import { theme } from '../fields';

export interface Cell {
  row: number; // from 0, the lowest
  from: number; // milliseconds since 1970
  to: number;
  color: string;
}

export interface CellsProps {
  rows: string[]; // names, the lowest first
  cells: Cell[];
  borders: boolean; // rows are named by their upper bounds, at the lines between them, rather than at their middle
  legend: Array<{ label: string; color: string }>;
  fill: number; // share of a row's height that is painted
  width: number;
  height: number;
  range: TimeRange;
}

const LETTER = 7.5; // pixels of width, with what is around a name
const ROW_NAMES = 12; // as many names of bounds as can be read beside each other

export function Cells(props: CellsProps): JSX.Element {
  const legend = props.legend.length ? (
    <VizLayout.Legend placement={'bottom' as LegendPlacement}>
      <VizLegend
        placement={'bottom' as LegendPlacement}
        displayMode={LegendDisplayMode.List}
        items={props.legend.map((item) => ({ ...item, yAxis: 1 }))}
      />
    </VizLayout.Legend>
  ) : null;
  return (
    <VizLayout width={props.width} height={props.height} legend={legend}>
      {(width, height) => (
        <UPlotChart config={chart(props)} data={[[props.range.from.valueOf(), props.range.to.valueOf()], [null, null]]} width={width} height={height} />
      )}
    </VizLayout>
  );
}

function chart({ rows, cells, borders, fill, range }: CellsProps): UPlotConfigBuilder {
  const builder = new UPlotConfigBuilder('utc');
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const shift = borders ? 0 : 0.5;
  builder.addScale({
    scaleKey: 'x',
    isTime: true,
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range: () => [from, to],
  });
  builder.addScale({
    scaleKey: 'y',
    orientation: ScaleOrientation.Vertical,
    direction: ScaleDirection.Up,
    range: () => [0, rows.length],
  });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone: 'utc', theme, grid: { show: false } });
  const every = borders ? Math.ceil(rows.length / ROW_NAMES) : 1;
  const named = rows.map((_, index) => index).filter((index) => (rows.length - 1 - index) % every === 0);
  builder.addAxis({
    scaleKey: 'y',
    placement: AxisPlacement.Left,
    theme,
    grid: { show: false },
    size: borders ? undefined : Math.max(...rows.map((row) => row.length)) * LETTER,
    splits: named.map((index) => index + (borders ? 1 : shift)),
    values: () => named.map((index) => rows[index]),
  });
  builder.addSeries({ scaleKey: 'y', pathBuilder: () => null, theme } as never);
  builder.addHook('draw', (plot) => {
    for (const cell of cells) {
      const left = Math.round(plot.valToPos(Math.max(cell.from, from), 'x', true));
      const right = Math.round(plot.valToPos(Math.min(cell.to, to), 'x', true));
      const gap = (1 - fill) / 2;
      const bottom = plot.valToPos(cell.row + gap, 'y', true);
      const top = plot.valToPos(cell.row + 1 - gap, 'y', true);
      if (right > left) {
        plot.ctx.fillStyle = cell.color;
        plot.ctx.fillRect(left, top, right - left, bottom - top);
      }
    }
  });
  return builder;
}
